"""SplitMasterAdamW is AdamW on fp32 weights of which the model sees the upper half."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from piledriver.kernels.rounding import join_fp32, split_fp32
from piledriver.optim import SplitMasterAdamW, clip_gradients, clip_in_step


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
@settings(max_examples=100, deadline=None)
def test_the_two_halves_are_the_whole(numbers: list[float]) -> None:
    whole = torch.tensor(numbers, dtype=torch.float32)
    high, low = split_fp32(whole)
    assert torch.equal(join_fp32(high, low).view(torch.int32), whole.view(torch.int32))


def test_the_upper_half_is_the_nearest_and_nan_stays_nan() -> None:
    whole = torch.randn(10_000)
    high, _ = split_fp32(whole)
    assert bool(((high.float() - whole).abs() <= (whole.bfloat16().float() - whole).abs()).all())
    assert bool(split_fp32(torch.tensor([float("nan"), -float("nan")]))[0].isnan().all())


def steps_of(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(20):
        for weight in weights:
            weight.grad = (torch.randn(weight.shape, generator=generator) / 100).bfloat16().to(weight)
        optimizer.step()


def test_updates_are_exactly_those_of_fp32_weights() -> None:
    small = [nn.Parameter(torch.randn(8, 16).bfloat16()), nn.Parameter(torch.randn(16).bfloat16())]
    wide = [nn.Parameter(weight.detach().float()) for weight in small]
    ours, theirs = (
        SplitMasterAdamW(small, lr=1e-3),
        torch.optim.AdamW(wide, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
    )
    steps_of(ours, small, 0)
    steps_of(theirs, wide, 0)
    for mine, expected in zip(small, wide, strict=True):
        torch.testing.assert_close(ours.master(mine), expected.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(mine.detach(), split_fp32(ours.master(mine))[0])


def test_small_moments_keep_their_means() -> None:
    weight = nn.Parameter(torch.zeros(64, 64).bfloat16())
    optimizer = SplitMasterAdamW([weight], lr=1e-3, moments="bf16")
    for _ in range(200):
        weight.grad = torch.full_like(weight, 1e-3)
        optimizer.step()
    state = optimizer.state[weight]
    assert state["exp_avg_sq"].dtype == torch.bfloat16
    assert float(state["exp_avg_sq"].float().mean()) == pytest.approx(float(weight.grad[0, 0].float()) ** 2, rel=0.02)


def test_clipping_within_the_step_is_clipping_before_it() -> None:
    first = [nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(4))]
    second = [nn.Parameter(weight.detach().clone()) for weight in first]
    gradients = [torch.randn_like(weight) for weight in first]
    one, other = SplitMasterAdamW(first, lr=1e-2), SplitMasterAdamW(second, lr=1e-2)
    for weights in (first, second):
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
    norms = clip_in_step(one, first, 0.5), clip_gradients(second, 0.5)
    one.step()
    other.step()
    assert torch.equal(*norms)
    for mine, expected, gradient in zip(first, second, gradients, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-7)
        assert mine.grad is not None
        assert torch.equal(mine.grad, gradient)


def test_a_resumed_run_is_the_run() -> None:
    weights = [nn.Parameter(torch.randn(8, 16).bfloat16())]
    optimizer = SplitMasterAdamW(weights, lr=1e-3, moments="bf16")
    steps_of(optimizer, weights, 0)
    kept, state = copy.deepcopy(weights), copy.deepcopy(optimizer.state_dict())
    steps_of(optimizer, weights, 1)
    again = SplitMasterAdamW(kept, lr=1e-3, moments="bf16")
    again.load_state_dict(state)
    steps_of(again, kept, 1)
    assert torch.equal(optimizer.master(weights[0]), again.master(kept[0]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_is_the_formula(moments: str, dtype: torch.dtype) -> None:
    def run(device: str) -> tuple[Tensor, Tensor]:
        weight = nn.Parameter(torch.randn(100, 30, generator=torch.Generator().manual_seed(0)).to(dtype).to(device))
        optimizer = SplitMasterAdamW([weight], lr=1e-3, moments=moments)  # type: ignore[arg-type]
        steps_of(optimizer, [weight], 0)
        return optimizer.master(weight).cpu(), optimizer.state[weight]["exp_avg"].float().cpu()

    for found, expected in zip(run("cuda"), run("cpu"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2 if moments == "bf16" else 1e-4, atol=1e-5)
