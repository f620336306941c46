"""Casts to fp8 and their products in plain torch: the numerics of fp8 units on any device.

A cast multiplies by (largest number of the format) / (largest magnitude), saturates and rounds to nearest. A product
sums in fp32 and undoes both scales.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.kernels.gated_mlp.reference import gate_gradients, split_gate_up
from piledriver.kernels.registry import Kernel

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""Matrix sizes must be multiples of this: the matrix units take no others."""
_SMALLEST = 1e-12


def pad_rows(rows: Tensor) -> Tensor:
    """Return [rows, columns] with rows of zeros added up to a multiple of `MULTIPLE`; they change no sum."""
    missing = -rows.shape[0] % MULTIPLE
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def padded_size(rows: int) -> int:
    """Return how many rows `pad_rows` returns."""
    return (rows + MULTIPLE - 1) // MULTIPLE * MULTIPLE


def needs_gradient(*tensors: Tensor) -> bool:
    """Return whether autograd records an operation on these tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


class ReferenceFp8(Kernel):
    """fp8 emulated: the same casts, products in fp32."""

    ops_to_save = ("piledriver::fp8_linear", "piledriver::fp8_gated_mlp")

    def cast(self, x: Tensor, dtype: torch.dtype, *, columns: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Return [rows, columns] in fp8, its transpose (empty if `columns` is false), and the one scale ([1])."""
        limit = torch.finfo(dtype).max
        largest = x.abs().amax().float().clamp(min=_SMALLEST)
        small = (x.float() * _factor(largest, limit)).clamp(-limit, limit).to(dtype)
        return small, small.t().contiguous() if columns else small.new_empty(0), (largest / limit).reshape(1)

    def cast_rows(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return [rows, columns] in fp8 and a scale per row ([rows, 1])."""
        limit = torch.finfo(dtype).max
        largest = x.abs().amax(dim=1, keepdim=True).float().clamp(min=_SMALLEST)
        return (x.float() * _factor(largest, limit)).clamp(-limit, limit).to(dtype), largest / limit

    def product(
        self,
        left: Tensor,
        right: Tensor,
        left_scale: Tensor,
        right_scale: Tensor,
        out: torch.dtype,
        *,
        fast: bool = False,
    ) -> Tensor:
        """Return left @ right.T of fp8 rows; scales are [1] each, or [rows, 1] each.

        `fast` lets matrix units sum in fewer bits, as is usual in a forward pass.
        """
        return (F.linear(left.float(), right.float()) * (left_scale * right_scale.t())).to(out)

    def gate(self, gate_up: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Return silu(gate) * up in fp8 and its scale; gate and up alternate in groups of columns."""
        gates, ups = split_gate_up(gate_up, group)
        small, _, scale = self.cast((F.silu(gates) * ups).flatten(-2), FORWARD, columns=False)
        return small, scale

    def gate_backward(
        self, gate_up: Tensor, gradient: Tensor, value_scale: Tensor, group: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradient of `gate_up` as rows and as columns, its scale, and the activation as columns."""
        by_gate_up, value = gate_gradients(gate_up, gradient, group)
        rows, columns, scale = self.cast(by_gate_up, BACKWARD)
        limit = torch.finfo(FORWARD).max
        small = (value * value_scale.reciprocal()).clamp(-limit, limit).to(FORWARD)
        return rows, columns, scale, small.t().contiguous()


def _factor(largest: Tensor, limit: float) -> Tensor:
    # Rounded once, as the GPU kernels do. A number divided by a tensor would be its reciprocal times the number:
    # rounded twice.
    return torch.full_like(largest, limit) / largest
