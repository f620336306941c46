"""Quantisation-aware training: compute with rounded weights, and pass gradients to the full ones (Jacob et al., 2018).

After training, rounding to nearest with the same scheme gives exactly the values that the model was trained with.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from piledriver.compress.scheme import KEPT_DENSE, Scheme
from piledriver.core.errors import UsageError
from piledriver.kernels.linear import dequantise_weight, weight_grid
from piledriver.models import Transformer
from piledriver.models.feed_forward.mlp import GatedMLP
from piledriver.models.layers import Linear
from piledriver.models.quantised import QuantisedLinear

_EDGE = 0.45
"""Of a step of the grid: how far from its code's value a weight may lie."""


def round_weight(weight: Tensor, scheme: Scheme) -> Tensor:
    """Return the weight rounded to its grid; the gradient passes through (straight-through estimator).

    The largest weight of a group, which sets its scale, gets no gradient, and with zero points neither does the
    smallest: moving it moves all values of the group, about which its own gradient says nothing.
    """
    with torch.no_grad():
        grid = weight_grid(weight, scheme.weights, group=scheme.group, symmetric=scheme.symmetric)
        difference = grid.values(grid.codes(weight)).to(weight.dtype) - weight
    groups = torch.unflatten(weight, 1, (grid.scales.shape[1], -1))
    if grid.zeros is None:
        fixed = groups.abs().argmax(dim=-1, keepdim=True)
    else:
        fixed = torch.cat((groups.argmin(dim=-1, keepdim=True), groups.argmax(dim=-1, keepdim=True)), dim=-1)
    return groups.scatter(-1, fixed, groups.detach().gather(-1, fixed)).flatten(1) + difference


class QuantisationAwareLinear(Linear):
    """A `Linear` that computes with its weight rounded; parameters and names are those of `Linear`."""

    scheme: Scheme

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ rounded(weight).T + bias."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, round_weight(self.weight, self.scheme).to(x.dtype), bias)


def make_quantisation_aware(model: Transformer, scheme: Scheme, skip: Sequence[str] = ()) -> list[str]:
    """Turn the linear layers of blocks into quantisation-aware ones, in place; return their names.

    Layers that `skip` names, that no scheme rounds, or whose columns the scheme's groups do not divide stay dense.
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
        if name.partition(".")[2] in KEPT_DENSE or not scheme.fits(module.in_features):
            continue
        module.__class__ = QuantisationAwareLinear
        module.scheme = scheme  # type: ignore[assignment]
        changed.append(full)
    if not changed:
        raise UsageError(f"no layer fits {scheme.name}", fix="use a smaller group, or skip fewer layers")
    return changed


@torch.no_grad()
def start_from_codes(model: Transformer, small: Transformer) -> Transformer:
    """Return a copy of a dense model whose weights round to the codes of a quantised one, as near to it as that allows.

    Quantisation-aware training of it begins with what GPTQ found, not with the nearest values: a weight that GPTQ moved
    to another code lies at the edge of that code's range. The largest weight of a group stays, as it spans the grid.
    """
    made = copy.deepcopy(model)
    found = 0
    for name, layer in small.blocks.named_modules():
        if not isinstance(layer, QuantisedLinear):
            continue
        if layer.zeros is not None or layer.kind == "fp8":
            raise UsageError(f"blocks.{name} has zero points or fp8 codes", fix="use symmetric int4 or int8")
        weight = made.blocks.get_parameter(f"{name}.weight")
        wide = torch.unflatten(weight.float(), 1, (layer.scales.shape[1], -1))
        values = torch.unflatten(dequantise_weight(layer.quantised, torch.float32), 1, (layer.scales.shape[1], -1))
        scales = layer.scales.float()[..., None].to(wide.device)
        values = values.to(wide.device)
        moved = torch.clamp(wide, values - _EDGE * scales, values + _EDGE * scales)
        moved = torch.clamp(moved, wide.amin(dim=-1, keepdim=True), wide.amax(dim=-1, keepdim=True))
        largest = wide.abs().argmax(dim=-1, keepdim=True)
        moved.scatter_(-1, largest, wide.gather(-1, largest))
        weight.copy_(moved.flatten(1).to(weight.dtype))
        found += 1
    if not found:
        raise UsageError("the second model has no quantised layer", fix="quantise it, for example by GPTQ")
    return made
