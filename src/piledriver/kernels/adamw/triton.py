# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
"""One AdamW step of one parameter as one GPU kernel: each tensor is read once and written once."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from piledriver.kernels.adamw.reference import StepConstants
from piledriver.kernels.registry import TritonKernel

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_BLOCK = 1024


if triton is not None:

    @triton.jit
    def _hash(index, salt):
        """32 random bits per index, as `rounding.hash_bits`."""
        bits = index * 0x9E3779B1 + salt
        bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
        bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
        return bits ^ (bits >> 16)

    @triton.jit
    def _round(x, bits):
        """fp32 to bf16, up or down with the probability that keeps the mean, as `rounding.round_to_bf16`."""
        noisy = x.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)
        return (noisy >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)

    @triton.jit
    def _master_adamw_kernel(
        weight,
        low,
        gradient,
        first,
        second,
        factor,
        size,
        lr,
        shrink,
        beta1,
        beta2,
        eps,
        corrections,
        step_salt,
        skip,
        first_index,
        noise_offset,
        split: tl.constexpr,
        rounded: tl.constexpr,
        block: tl.constexpr,
    ):
        here = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        # A skipped step reads and writes nothing.
        inside = here < tl.where(tl.load(skip) == 0, size, 0)
        if split:
            high = tl.load(weight + here, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
            value = (high << 16) + tl.load(low + here, mask=inside, other=0).to(tl.int32)
            value = value.to(tl.float32, bitcast=True)
        else:
            value = tl.load(weight + here, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(gradient + here, mask=inside, other=0.0).to(tl.float32) * tl.load(factor)
        m = beta1 * tl.load(first + here, mask=inside, other=0.0).to(tl.float32) + (1.0 - beta1) * slope
        v = beta2 * tl.load(second + here, mask=inside, other=0.0).to(tl.float32) + (1.0 - beta2) * slope * slope
        value = value * shrink - lr * (m / tl.load(corrections)) / (tl.sqrt(v / tl.load(corrections + 1)) + eps)
        if rounded:
            salt = (tl.load(step_salt) + noise_offset) & 0x7FFFFFFF
            bits = _hash((first_index + here).to(tl.uint32), salt.to(tl.uint32))
            tl.store(first + here, _round(m, bits), mask=inside)
            tl.store(second + here, _round(v, bits >> 16), mask=inside)
        else:
            tl.store(first + here, m, mask=inside)
            tl.store(second + here, v, mask=inside)
        if split:
            whole = value.to(tl.int32, bitcast=True)
            # The nearest upper half; the signed remainder fits the lower half.
            high = tl.where(value == value, (whole + 0x8000) >> 16, 0x7FC0)
            tl.store(weight + here, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
            tl.store(low + here, (whole - (high << 16)).to(tl.int16), mask=inside)
        else:
            tl.store(weight + here, value, mask=inside)


class TritonAdamW(TritonKernel):
    """The step as one kernel."""

    def __call__(
        self,
        weight: Tensor,
        low: Tensor | None,
        gradient: Tensor,
        first: Tensor,
        second: Tensor,
        factor: Tensor,
        rates: tuple[float, ...],
        constants: StepConstants,
        first_index: int,
        noise_offset: int,
    ) -> None:
        """Update a weight and its moments in place, as `ReferenceAdamW` does."""
        skip = _false(weight.device) if constants.skip is None else constants.skip.view(torch.uint8)
        _master_adamw_kernel[(triton.cdiv(weight.numel(), _BLOCK),)](
            weight,
            weight if low is None else low,
            gradient,
            first,
            second,
            factor,
            weight.numel(),
            *rates,
            constants.bias_corrections,
            constants.salt,
            skip,
            first_index,
            noise_offset,
            split=low is not None,
            rounded=first.element_size() == 2,
            block=_BLOCK,
            num_warps=4,
        )


@functools.cache
def _false(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.uint8, device=device)
