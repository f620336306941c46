"""Linear layers with quantised weights: int8 and fp8 with a scale for each row, int4 with one for each group of 128."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from piledriver.core.errors import UsageError
from piledriver.kernels.linear import GROUP, QuantisedWeight, WeightKind, linear, quantise_weight
from piledriver.models.feed_forward.mlp import GatedMLP
from piledriver.models.layers import Linear
from piledriver.models.transformer import Transformer


class QuantisedLinear(nn.Module):
    """A `Linear` whose weight is stored in 8 or 4 bits; inference only.

    >>> layer = Linear(128, 8, bias=False)
    >>> _ = nn.init.normal_(layer.weight)
    >>> small = QuantisedLinear.from_linear(layer, "int4")
    >>> x = torch.randn(3, 128)
    >>> bool((small(x) - layer(x)).abs().mean() < 0.2 * layer(x).abs().mean())
    True
    """

    weight: Tensor
    scales: Tensor

    def __init__(self, quantised: QuantisedWeight, bias: Tensor | None = None) -> None:
        super().__init__()
        self.kind = quantised.kind
        self.out_features, self.in_features = quantised.shape
        self.register_buffer("weight", quantised.data)
        self.register_buffer("scales", quantised.scales)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def from_linear(cls, layer: nn.Linear, kind: WeightKind) -> QuantisedLinear:
        """Round a layer's weight to the nearest values of `kind`; int4 is int8 where groups do not fit."""
        if kind == "int4" and layer.in_features % GROUP:
            kind = "int8"
        return cls(quantise_weight(layer.weight, kind), layer.bias)

    @property
    def quantised(self) -> QuantisedWeight:
        """The weight, as kernels take it."""
        return QuantisedWeight(self.kind, self.weight, self.scales)

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias in the dtype of x."""
        out = linear(x.flatten(0, -2), self.quantised, bias=self.bias)
        return torch.unflatten(out, 0, x.shape[:-1])

    def _apply(self, fn: object, recurse: bool = True) -> QuantisedLinear:
        # `.to(bfloat16)` must leave quantised values as they are: only devices change.
        data = self.weight
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight.dtype != data.dtype:
            self.weight = data.to(self.weight.device)
        return self


def quantise_linears(model: Transformer, kind: WeightKind, *, head: WeightKind | None = None) -> Transformer:
    """Replace the linear layers of all blocks by quantised ones, in place; return the model.

    `head` quantises the output projection too, beside a tied embedding, which stays as it is. Experts and routers are
    not quantised.
    """
    if model.config.moe is not None:
        raise UsageError("experts cannot be quantised", fix="serve the model in 16 bits")
    if model.config.latent is not None:
        raise UsageError("latent attention cannot be quantised", fix="serve the model in 16 bits")
    if head is not None and model.config.head_bias:
        raise UsageError("an output projection with a bias cannot be quantised", fix="leave out head")
    for block in model.blocks.values():
        for module in list(block.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, Linear):
                    setattr(module, name, QuantisedLinear.from_linear(child, kind))
            if isinstance(module, GatedMLP):
                module.fuse = False
    if head is not None:
        small = quantise_weight(model.output_weight(), head)
        model.project = partial(project_quantised, quantised=small)
    return model


def project_quantised(hidden: Tensor, weight: Tensor, *, quantised: QuantisedWeight) -> Tensor:
    """Return logits from a quantised copy of the output weight, in place of `models.loss.project`."""
    out = linear(hidden.flatten(0, -2), quantised)
    return torch.unflatten(out, 0, hidden.shape[:-1])
