"""One AdamW step of one parameter in plain torch, with split fp32 weights, skipping and stochastic rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from piledriver.kernels.masked_copy import masked_copy_
from piledriver.kernels.registry import Kernel
from piledriver.kernels.rounding import join_fp32, noise_bits, round_to_bf16, split_fp32


@dataclass(frozen=True)
class StepConstants:
    """What follows from the number of a step, as tensors on the parameter's device."""

    bias_corrections: Tensor
    """[2] float32: of the first and the second moment."""
    salt: Tensor
    """int64: the salt of the step's rounding noise."""
    skip: Tensor | None
    """Boolean, true if the step must change nothing; None if it cannot be skipped."""


class ReferenceAdamW(Kernel):
    """The step, operator by operator."""

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
        """Update a weight and its moments in place.

        `low` is the lower half of a bf16 weight's fp32 value, or None for an fp32 weight. `factor` scales the gradient
        (clipping); `rates` are lr, 1 - lr * weight_decay, beta1, beta2 and eps. bf16 moments are rounded
        stochastically, with noise from the index in the whole parameter (this part begins at `first_index`) and from
        `noise_offset`, which differs between parameters.
        """
        lr, shrink, beta1, beta2, eps = rates
        correction1, correction2 = constants.bias_corrections
        value = weight.float() if low is None else join_fp32(weight, low)
        scaled = gradient.float() * factor
        m = (first.float() * beta1).add_(scaled, alpha=1.0 - beta1)
        v = (second.float() * beta2).addcmul_(scaled, scaled, value=1.0 - beta2)
        value = value * shrink - lr * (m / correction1) / ((v / correction2).sqrt() + eps)
        if first.dtype == torch.bfloat16:
            salt = (constants.salt + noise_offset) & 0x7FFFFFFF
            bits = noise_bits(1, first.numel(), first_index, salt, first.device).view_as(m)
            m, v = round_to_bf16(m, bits), round_to_bf16(v, bits >> 16)
        masked_copy_(first, m, constants.skip)
        masked_copy_(second, v, constants.skip)
        if low is None:
            masked_copy_(weight, value, constants.skip)
        else:
            high, rest = split_fp32(value)
            masked_copy_(weight, high, constants.skip)
            masked_copy_(low, rest, constants.skip)
