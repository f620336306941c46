"""Casts to fp8 and the products of what they give: on GPUs that have the units, and with the same numerics elsewhere.

A cast multiplies by (largest number of the format) / (largest magnitude), saturates and rounds to nearest. The product
sums in fp32 and undoes both scales. Without the units the casts are the same and the product is taken in fp32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.kernels.fp8 import triton_casts as fp8_kernels

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""The matrix units take sizes that this divides."""
_SMALLEST = 1e-12


def has_units(device: torch.device) -> bool:
    """Whether fp8 products run on this device: Hopper and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0) and fp8_kernels.available()


def cast(x: Tensor, dtype: torch.dtype, *, columns: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """[rows, columns] with one scale: fp8, the same turned over (empty where not wanted), and the scale ([1])."""
    if has_units(x.device):
        return fp8_kernels.cast(x.contiguous(), dtype, columns)
    limit = torch.finfo(dtype).max
    largest = x.abs().amax().float().clamp(min=_SMALLEST)
    small = (x.float() * _factor(largest, limit)).clamp(-limit, limit).to(dtype)
    return small, small.t().contiguous() if columns else small.new_empty(0), (largest / limit).reshape(1)


def cast_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[rows, columns] with a scale per row: fp8 and the scales ([rows, 1])."""
    if has_units(x.device):
        return fp8_kernels.cast_rows(x.contiguous(), dtype)
    limit = torch.finfo(dtype).max
    largest = x.abs().amax(dim=1, keepdim=True).float().clamp(min=_SMALLEST)
    return (x.float() * _factor(largest, limit)).clamp(-limit, limit).to(dtype), largest / limit


def _factor(largest: Tensor, limit: float) -> Tensor:
    # Rounded once, as the kernels do. A number divided by a tensor is its reciprocal times the number: rounded twice.
    return torch.full_like(largest, limit) / largest


def product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, out: torch.dtype, *, fast: bool = False
) -> Tensor:
    """left @ right.T of fp8 rows. `fast` lets the matrix units sum in fewer bits, as is usual in a forward pass.

    Scales are [1] each, or [rows, 1] each.
    """
    if has_units(left.device):
        other = right_scale if right_scale.numel() == 1 else right_scale.t()
        return torch._scaled_mm(left, right.t(), scale_a=left_scale, scale_b=other, out_dtype=out, use_fast_accum=fast)
    return (F.linear(left.float(), right.float()) * (left_scale * right_scale.t())).to(out)


def gate(gate_up: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """silu(gate) * up in fp8, with its scale; the two alternate in groups of columns."""
    if has_units(gate_up.device):
        return fp8_kernels.gate(gate_up, group, FORWARD)
    gates, ups = torch.unflatten(gate_up.float(), -1, (-1, 2, group)).unbind(-2)
    small, _, scale = cast((F.silu(gates) * ups).flatten(-2), FORWARD, columns=False)
    return small, scale


def gate_backward(
    gate_up: Tensor, gradient: Tensor, value_scale: Tensor, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient by `gate_up` as rows and as columns, its scale, and what `gate` gave, as columns."""
    if has_units(gate_up.device):
        return fp8_kernels.gate_backward(gate_up, gradient.contiguous(), value_scale, group, BACKWARD, FORWARD)
    gates, ups = torch.unflatten(gate_up.float(), -1, (-1, 2, group)).unbind(-2)
    slope = torch.unflatten(gradient.float(), -1, (-1, group))
    sigmoid = gates.sigmoid()
    swish = gates * sigmoid
    by_gate, by_up = slope * ups * (sigmoid + swish * (1.0 - sigmoid)), slope * swish
    rows, columns, scale = cast(torch.stack((by_gate, by_up), dim=-2).flatten(1), BACKWARD)
    limit = torch.finfo(FORWARD).max
    value = ((swish * ups).flatten(-2) * value_scale.reciprocal()).clamp(-limit, limit).to(FORWARD)
    return rows, columns, scale, value.t().contiguous()
