"""The AdamW kernels: what torch's AdamW gives on fp32 weights, and what the formula gives for every variant."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from piledriver.kernels.adamw import StepConstants
from piledriver.kernels.registry import KERNELS
from piledriver.kernels.rounding import join_fp32, split_fp32
from tests.engine.gpu import ON_GPU
from tests.kernels.interpreter import interpret

LR, DECAY, BETAS, EPS = 1e-2, 0.1, (0.9, 0.95), 1e-8
VARIANTS = list(itertools.product([False, True], [torch.float32, torch.bfloat16], [None, False, True]))


def after(name: str, split: bool, moments: torch.dtype, skip: bool | None, device: str = "cpu") -> list[Tensor]:
    """Weight (joined), and moments after three steps of one kernel."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(50, 30, generator=generator)
    weight, low = (x.to(device) for x in split_fp32(value)) if split else (value.to(device), None)
    first, second = torch.zeros(2, 50, 30, dtype=moments, device=device)
    step = KERNELS["adamw"][name]()
    for number in range(1, 4):
        gradient = torch.randn(50, 30, generator=generator).to(device, weight.dtype)
        constants = StepConstants(
            torch.tensor([1.0 - beta**number for beta in BETAS], device=device),
            torch.tensor(12345 + number, device=device),
            None if skip is None else torch.tensor(skip, device=device),
        )
        rates = (LR, 1.0 - LR * DECAY, *BETAS, EPS)
        step(weight, low, gradient, first, second, torch.tensor(0.5, device=device), rates, constants, 700, 99)
    return [x.cpu().float() for x in (weight if low is None else join_fp32(weight, low), first, second)]


def test_the_formula_is_adamw() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(50, 30, generator=generator))
    optimizer = torch.optim.AdamW([weight], LR, BETAS, EPS, DECAY)
    for _ in range(3):
        weight.grad = 0.5 * torch.randn(50, 30, generator=generator)
        optimizer.step()
    torch.testing.assert_close(after("reference", False, torch.float32, None)[0], weight.detach())


def test_a_skipped_step_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    weight, first, second = after("reference", True, torch.bfloat16, True)
    assert torch.equal(weight, torch.randn(50, 30, generator=generator))
    assert not first.any()
    assert not second.any()


# bf16 moments are compared within a step of bf16: noise near a rounding boundary may fall on either side.
CHECK = """
import torch
from tests.kernels.test_adamw import VARIANTS, after
for split, moments, skip in VARIANTS:
    found, expected = (after(name, split, moments, skip) for name in ("triton", "reference"))
    torch.testing.assert_close(found, expected, rtol=1e-2 if moments == torch.bfloat16 else 1e-5, atol=1e-6)
"""


def test_the_triton_kernel_is_the_formula() -> None:
    interpret(CHECK)


class TestOnGpu:
    pytestmark = ON_GPU

    @pytest.mark.parametrize(("split", "moments", "skip"), VARIANTS)
    def test_the_triton_kernel_is_the_formula(self, split: bool, moments: torch.dtype, skip: bool | None) -> None:
        found, expected = after("triton", split, moments, skip, "cuda"), after("reference", split, moments, skip)
        torch.testing.assert_close(found, expected, rtol=1e-2 if moments == torch.bfloat16 else 1e-4, atol=1e-5)
