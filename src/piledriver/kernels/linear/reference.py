"""Linear layers in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.quantised_weight import QuantisedWeight, dequantise_weight
from piledriver.kernels.registry import Kernel

TILE = 16
"""Rows from which on, and in multiples of which, CPU products compute each row in the same order."""


class ReferenceLinear(Kernel):
    """The formula. With `invariant`, products have one fixed shape."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | QuantisedWeight,
        fused: Fused = PRODUCT_ONLY,
        *,
        invariant: bool = False,
    ) -> Tensor:
        _, _, bias, gate_block, residual = fused
        x = fused.normalised(x)
        plain = dequantise_weight(weight, x.dtype) if isinstance(weight, QuantisedWeight) else weight.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
        out = _in_tiles(x, plain, bias) if invariant else F.linear(x, plain, bias)
        if gate_block:
            gates, ups = out.float().unflatten(-1, (-1, 2, gate_block)).unbind(-2)  # type: ignore[no-untyped-call]
            out = (F.silu(gates) * ups).flatten(-2).to(x.dtype)
        return out if residual is None else out + residual


def _in_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    padded = F.pad(x, (0, 0, 0, -len(x) % TILE))
    return torch.cat([F.linear(tile.clone(), weight, bias) for tile in torch.split(padded, TILE)])[: len(x)]
