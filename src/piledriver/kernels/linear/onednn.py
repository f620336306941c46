"""Linear layers on a CPU by oneDNN, over weights that are copied once into the layout its kernels read.

torch's own products, OpenBLAS's or MKL's, repack the weight in every product of a few rows. A product with one vector
reads the weight as it is. Packed copies double the memory of the weights; they are made when several rows are first
computed, and dropped with the weight, when it changes, or by `forget_packed`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from piledriver.kernels.linear.fused import PRODUCT_ONLY, Fused
from piledriver.kernels.linear.reference import ReferenceLinear
from piledriver.kernels.quantised_weight import QuantisedWeight

_ROWS = 8
"""Rows that the layout is chosen for; it serves any number."""
_packed: Any = WeakTensorKeyDictionary()


class OneDnnLinear(ReferenceLinear):
    """The formula, with products of several fp32 rows by oneDNN."""

    devices = frozenset({"cpu"})

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """Return whether the device is a CPU, and torch has oneDNN."""
        return super().runs_on(device) and _has_onednn()

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | QuantisedWeight,
        fused: Fused = PRODUCT_ONLY,
        *,
        invariant: bool = False,
    ) -> Tensor:
        if invariant or isinstance(weight, QuantisedWeight) or not _packable(x, weight):
            return super().__call__(x, weight, fused, invariant=invariant)
        _, _, bias, gate_block, residual = fused
        x = fused.normalised(x)
        if len(x) == 1:
            out = F.linear(x, weight, bias)
        else:
            out = torch.ops.mkldnn._linear_pointwise(x, packed_weight(weight), bias, "none", [], "")
        out = self.gate(out, gate_block) if gate_block else out
        return out if residual is None else out.add_(residual)

    def gate(self, x: Tensor, block: int) -> Tensor:
        """Return silu(gate) * up of a product, contiguous fp32 outside autograd, whose columns alternate in blocks."""
        gates, ups = x.unflatten(-1, (-1, 2, block)).unbind(-2)  # type: ignore[no-untyped-call]
        return F.silu(gates).mul_(ups).flatten(-2)


def packed_weight(weight: Tensor) -> Tensor:
    """Return the packed copy of a weight, made anew if the weight has changed in place or moved."""
    state = weight._version, weight.data_ptr()
    found = _packed.get(weight)
    if found is None or found[0] != state:
        found = state, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
        _packed[weight] = found
    packed: Tensor = found[1]
    return packed


def forget_packed(weights: Iterable[Tensor]) -> None:
    """Drop the packed copies of weights whose content may have changed without a trace (through `.data`)."""
    for weight in weights:
        _packed.pop(weight, None)


def _packable(x: Tensor, weight: Tensor) -> bool:
    plain = x.dtype == weight.dtype == torch.float32 and not torch.is_grad_enabled()
    return plain and not weight.is_inference()  # which counts no changes


@functools.cache
def _has_onednn() -> bool:
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
