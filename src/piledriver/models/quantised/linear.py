"""Linear layers with quantised weights: int8 and fp8 with a scale for each row, int4 with one for each group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piledriver.core.errors import UsageError
from piledriver.kernels.linear import GROUP, QuantisedWeight, WeightKind, dequantise_weight, linear, quantise_weight
from piledriver.models.codes import QuantisedCodes
from piledriver.models.torch_private import int8_product

_MOST = {"int8": 127.0, "fp8": 448.0}


class QuantisedLinear(QuantisedCodes):
    """A `Linear` whose weight is stored in 8 or 4 bits; inference only.

    >>> layer = nn.Linear(128, 8, bias=False)
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
