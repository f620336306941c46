# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
# ruff: noqa: N803
"""Rows of an embedding table with 8-bit codes: on a GPU, one kernel looks them up and multiplies them by their scales.

A decode step begins with it, and its other kernels are so short that torch's three kernels in its place would show.
"""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.early_launch import launch_options, starts_early
from piledriver.kernels.quantised_weight import QuantisedWeight
from piledriver.kernels.registry import HAS_TRITON

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_BLOCK = 1024
_FP8_CAPABILITY = (8, 9)
"""The oldest NVIDIA GPUs for which Triton converts fp8 numbers."""

if triton is not None:
    from piledriver.kernels.early_launch import gdc_launch_dependents, gdc_wait

    @triton.jit
    def _embedding_rows(rows, data, scales, out, count, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
        if EARLY:
            gdc_launch_dependents()
            gdc_wait()
        place = tl.program_id(0).to(tl.int64)
        row = tl.load(rows + place).to(tl.int64)
        known = (row >= 0) & (row < count)
        row = tl.where(known, row, 0)
        scale = tl.where(known, tl.load(scales + row).to(tl.float32), float("nan"))
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        codes = tl.load(data + row * width + column, mask=column < width)
        value = codes.to(tl.float32) * scale
        tl.store(out + place * width + column, value.to(out.dtype.element_ty), mask=column < width)


def embedding_rows(weight: QuantisedWeight, rows: Tensor) -> Tensor:
    """Return rows of an int8 or fp8 weight with a scale for each row, in the dtype of the scales.

    The GPU's kernel returns NaN for a row that does not exist.

    >>> from piledriver.kernels.linear import quantise_weight
    >>> weight = quantise_weight(torch.tensor([[1.0, 2.0], [127.0, -127.0]]), "int8")
    >>> embedding_rows(weight, torch.tensor([1, 1]))
    tensor([[ 127., -127.],
            [ 127., -127.]])
    """
    if _has_kernel(weight, rows):
        return _looked_up(weight, rows)
    codes = weight.data[rows]
    if weight.kind == "fp8":  # which has no arithmetic of its own
        codes = codes.to(weight.scales.dtype)
    return codes * weight.scales[rows]


def _has_kernel(weight: QuantisedWeight, rows: Tensor) -> bool:
    """Return whether the Triton kernel takes these; torch's compiler makes one kernel of the formula itself."""
    if not (HAS_TRITON and rows.is_cuda) or torch.compiler.is_compiling():
        return False
    readable = weight.kind == "int8" or (
        torch.version.hip is None and torch.cuda.get_device_capability(rows.device) >= _FP8_CAPABILITY
    )
    scale_a_row = weight.scales.shape[1] == 1 and weight.scales.is_contiguous()
    return readable and scale_a_row and weight.data.is_contiguous() and rows.is_contiguous() and rows.numel() > 0


def _looked_up(weight: QuantisedWeight, rows: Tensor) -> Tensor:
    """Return the same by the Triton kernel."""
    count, width = weight.data.shape
    early = starts_early(rows.device)
    out = torch.empty(*rows.shape, width, dtype=weight.scales.dtype, device=rows.device)
    _embedding_rows[(rows.numel(), triton.cdiv(width, _BLOCK))](
        rows, weight.data, weight.scales, out, count, width, BLOCK=_BLOCK, EARLY=early, **launch_options(early)
    )
    return out
