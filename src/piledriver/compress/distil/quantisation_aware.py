"""Quantisation-aware training: compute with rounded weights, and pass gradients to the full ones (Jacob et al., 2018).

After training, rounding to nearest with the same scheme gives exactly the values that the model was trained with.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from piledriver.compress.scheme import Scheme
from piledriver.core.errors import UsageError
from piledriver.kernels.linear import weight_grid
from piledriver.models import Transformer
from piledriver.models.feed_forward.mlp import GatedMLP
from piledriver.models.layers import Linear


def round_weight(weight: Tensor, scheme: Scheme) -> Tensor:
    """Return the weight rounded to its grid; the gradient passes through (straight-through estimator)."""
    with torch.no_grad():
        grid = weight_grid(weight, scheme.weights, group=scheme.group, symmetric=scheme.symmetric)
        difference = grid.values(grid.codes(weight)).to(weight.dtype) - weight
    return weight + difference


class QuantisationAwareLinear(Linear):
    """A `Linear` that computes with its weight rounded; parameters and names are those of `Linear`."""

    scheme: Scheme

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ rounded(weight).T + bias."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, round_weight(self.weight, self.scheme).to(x.dtype), bias)


def make_quantisation_aware(model: Transformer, scheme: Scheme, skip: Sequence[str] = ()) -> list[str]:
    """Turn the linear layers of blocks into quantisation-aware ones, in place; return their names.

    Layers that `skip` names, routers and layers whose columns the scheme's groups do not divide stay as they are.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UsageError("the model is sharded already", fix="change it before its layout is applied")
    changed = []
    for name, module in model.blocks.named_modules():
        if isinstance(module, GatedMLP):
            module.fuse = False
        full = f"blocks.{name}"
        if type(module) is not Linear or any(fnmatch.fnmatch(full, pattern) for pattern in skip):
            continue
        if name.endswith("router.score") or not scheme.fits(module.in_features):
            continue
        module.__class__ = QuantisationAwareLinear
        module.scheme = scheme  # type: ignore[assignment]
        changed.append(full)
    if not changed:
        raise UsageError(f"no layer fits {scheme.name}", fix="use a smaller group, or skip fewer layers")
    return changed
