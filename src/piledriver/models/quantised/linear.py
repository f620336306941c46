"""Linear layers with quantised weights: int8 and fp8 with a scale for each row, int4 with one for each group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piledriver.core.errors import UsageError
from piledriver.kernels.linear import (
    GROUP,
    QuantisedWeight,
    WeightKind,
    dequantise_weight,
    linear,
    quantise_weight,
)
from piledriver.models.feed_forward.mlp import GatedMLP
from piledriver.models.layers import Linear
from piledriver.models.torch_private import int8_product
from piledriver.models.transformer import Transformer

_MOST = {"int8": 127.0, "fp8": 448.0}


class QuantisedCodes(nn.Module):
    """A quantised weight as buffers, which follow the module to a device and keep their dtype in a cast."""

    weight: Tensor
    scales: Tensor
    zeros: Tensor | None

    def __init__(self, quantised: QuantisedWeight, *, persistent: bool = True) -> None:
        super().__init__()
        self.kind = quantised.kind
        self.register_buffer("weight", quantised.data, persistent=persistent)
        self.register_buffer("scales", quantised.scales, persistent=persistent)
        self.register_buffer("zeros", quantised.zeros, persistent=persistent)

    @property
    def quantised(self) -> QuantisedWeight:
        """The weight, as kernels take it."""
        return QuantisedWeight(self.kind, self.weight, self.scales, self.zeros)

    def _apply(self, fn: object, recurse: bool = True) -> QuantisedCodes:
        # `.to(bfloat16)` must leave codes and scales as they are: only devices change.
        data, scales = self.weight, self.scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.weight.dtype != data.dtype:
            self.weight = data.to(self.weight.device)
        if self.scales.dtype != scales.dtype:
            self.scales = scales.to(self.scales.device)
        return self


class QuantisedLinear(QuantisedCodes):
    """A `Linear` whose weight is stored in 8 or 4 bits; inference only.

    >>> layer = Linear(128, 8, bias=False)
    >>> _ = nn.init.normal_(layer.weight)
    >>> small = QuantisedLinear.from_linear(layer, "int4")
    >>> x = torch.randn(3, 128)
    >>> bool((small(x) - layer(x)).abs().mean() < 0.2 * layer(x).abs().mean())
    True
    """

    def __init__(self, quantised: QuantisedWeight, bias: Tensor | None = None) -> None:
        super().__init__(quantised)
        self.out_features, self.in_features = quantised.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @classmethod
    def from_linear(cls, layer: nn.Linear, kind: WeightKind) -> QuantisedLinear:
        """Round a layer's weight to the nearest values of `kind`; int4 is int8 where groups do not fit."""
        if kind == "int4" and layer.in_features % GROUP:
            kind = "int8"
        return cls(quantise_weight(layer.weight, kind), layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias in the dtype of x."""
        out = linear(x.flatten(0, -2), self.quantised, bias=self.bias)
        return torch.unflatten(out, 0, x.shape[:-1])


class DynamicQuantisedLinear(QuantisedLinear):
    """A `QuantisedLinear` that also rounds its input to 8 bits, with a scale for each token (W8A8, dynamic).

    The product of int8 weights and inputs is summed exactly, in int32. fp8 inputs are rounded, then multiplied in the
    dtype of the input; where the weight has a scale for each group of columns, so have they.
    """

    def __init__(self, quantised: QuantisedWeight, bias: Tensor | None = None) -> None:
        super().__init__(quantised, bias)
        if self.kind == "int4":
            raise UsageError("inputs of an int4 weight are not quantised", fix="use int8 or fp8 weights")

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias in the dtype of x, with x rounded to 8 bits."""
        wide = torch.unflatten(x.flatten(0, -2).float(), 1, (self.scales.shape[1], -1))
        scales = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / _MOST[self.kind]
        if self.kind == "int8":
            codes = (wide / scales).round().clamp(-127, 127).to(torch.int8)
            out = int8_product(codes.flatten(1), self.weight).float() * scales[:, 0] * self.scales.float().t()
        else:
            codes = (wide / scales).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            rounded = (codes.float() * scales).flatten(1).to(x.dtype)
            out = F.linear(rounded, dequantise_weight(self.quantised, x.dtype))
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return torch.unflatten(out.to(x.dtype), 0, x.shape[:-1])


class QuantisedProjection(QuantisedCodes):
    """The output projection from a quantised copy of its weight, in place of `models.loss.project`.

    It is not part of the model's state: the weight that it was made from is.
    """

    def __init__(self, quantised: QuantisedWeight) -> None:
        super().__init__(quantised, persistent=False)

    def forward(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return logits; the model's own `weight` is not read."""
        out = linear(hidden.flatten(0, -2), self.quantised)
        return torch.unflatten(out, 0, hidden.shape[:-1])


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
        model.project = QuantisedProjection(quantise_weight(model.output_weight(), head))
    return model


def replace_linear(model: nn.Module, name: str, layer: QuantisedLinear) -> None:
    """Put a quantised layer in the place of the linear layer `name`, with its bias; MLPs then use no fused kernel."""
    parent, _, last = name.rpartition(".")
    module = model.get_submodule(parent)
    bias = getattr(module, last).bias
    if bias is not None and layer.bias is None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    setattr(module, last, layer)
    if isinstance(module, GatedMLP):
        module.fuse = False
