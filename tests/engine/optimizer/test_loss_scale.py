"""Loss scaling does what torch's and DeepSpeed's do, and what they do silently it says."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from piledriver.engine.errors import EngineError, LayoutError
from piledriver.engine.optimizer.loss_scale import LossScale, LossScaler, first_scale, next_scale, torch_like
from piledriver.engine.optimizer.nonfinite import NonFiniteError, check_finite
from piledriver.optim import gradient_norm
from tests.checkpoint.processes import run as on_ranks


def one_weight() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


def drive(scaler: LossScaler | torch.amp.GradScaler, overflows: list[bool]) -> list[tuple[float, float]]:
    """The weight and the scale after each step."""
    model, optimizer = one_weight()
    seen = []
    for overflow in overflows:
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 1)).sum()).backward()
        if overflow:
            assert model.weight.grad is not None
            model.weight.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        seen.append((model.weight.item(), scaler.get_scale()))
    return seen


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 4))
def test_with_hysteresis_one_it_is_torch(overflows: list[bool], window: int) -> None:
    ours = LossScaler(torch_like(2.0**20, growth_interval=window))
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=window)
    assert drive(ours, overflows) == drive(theirs, overflows)
    assert ours.skipped == sum(overflows)
    if overflows:
        theirs.load_state_dict(ours.state_dict())
        ours.load_state_dict(theirs.state_dict())
        assert drive(ours, overflows) == drive(theirs, overflows)


# Worked by hand from DeepSpeed's rule: an overflow uses up one of `hysteresis`, the last one halves the scale and stays
# used up; `window` good steps in a row double it and refill; with consecutive_hysteresis any good step refills.
# x: overflow, o: good step.
DEEPSPEED = [
    ("xxx", {"hysteresis": 1}, [32, 16, 8]),
    ("xxx", {"hysteresis": 2}, [64, 32, 16]),
    ("xxxx", {"hysteresis": 3}, [64, 64, 32, 16]),
    ("xoxox", {"hysteresis": 2}, [64, 64, 32, 32, 16]),
    ("xoxox", {"hysteresis": 2, "consecutive_hysteresis": True}, [64, 64, 64, 64, 64]),
    ("oooo", {"window": 2}, [64, 128, 128, 256]),
    ("xoooxx", {"window": 3}, [64, 64, 64, 128, 128, 64]),
    ("ooxooo", {"window": 3}, [64, 64, 64, 64, 64, 128]),
    ("xxxx", {"hysteresis": 1, "minimum": 16.0}, [32, 16, 16, 16]),
    ("xoxo", {"static": 64.0, "window": 1}, [64, 64, 64, 64]),
]


@pytest.mark.parametrize(("steps", "settings", "scales"), DEEPSPEED)
def test_deepspeeds_rule(steps: str, settings: dict[str, float], scales: list[int]) -> None:
    config = LossScale(initial=64.0, **settings)  # type: ignore[arg-type]
    state, found = first_scale(config), []
    for step in steps:
        state = next_scale(config, state, step == "x")
        found.append(state.scale)
    assert found == scales


def test_a_skipped_step_is_shown_and_the_smallest_scale_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = one_weight()
    scaler = LossScaler(LossScale(initial=4.0, hysteresis=1, minimum=2.0), models=[model])
    for step in (1, 2):
        model.weight.grad = torch.full((1, 1), float("nan"))
        scaler.step(optimizer)
        assert model.weight.item() == 1.0
        if step == 1:
            with caplog.at_level(logging.WARNING):
                scaler.update()
    assert "step 1 skipped" in caplog.text
    assert "gradient of weight" in caplog.text
    assert "falls from 4 to 2" in caplog.text
    assert scaler.last_step_skipped
    with pytest.raises(EngineError, match=r"step 2 although the loss scale is at its minimum 2.*gradient of weight"):
        scaler.update()


def test_wrong_use_is_refused() -> None:
    model, optimizer = one_weight()
    scaler = LossScaler()
    model.weight.grad = torch.ones(1, 1)
    scaler.unscale_(optimizer)
    assert scaler.is_unscaled(optimizer)
    with pytest.raises(EngineError, match="unscaled already"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(EngineError, match="step was called already"):
        scaler.step(optimizer)
    with pytest.raises(LayoutError, match="below its minimum"):
        LossScale(initial=0.5)
    half = nn.Linear(1, 1).half()
    half.weight.grad = torch.ones(1, 1).half()
    with pytest.raises(EngineError, match="fp16"):
        LossScaler().unscale_(torch.optim.SGD(half.parameters(), lr=1.0))


def test_fp16_training_finds_its_scale() -> None:
    """In real fp16 a scale of 2^30 overflows until it has fallen far enough, and then the model learns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = LossScaler(LossScale(initial=2.0**30, hysteresis=1))
    x = torch.randn(64, 8)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        loss = (out.float() - x.sum(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert 0 < scaler.skipped < 30
    assert scaler.get_scale() == 2.0 ** (30 - scaler.skipped)
    assert losses[scaler.skipped - 1] == losses[0]
    assert losses[-1] < 0.8 * losses[0]


def test_the_watch_names_parameter_and_loss() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    (model(torch.ones(1, 2)).sum()).backward()
    check_finite([model], gradient_norm(model.parameters()))
    assert model[0].weight.grad is not None
    model[0].weight.grad[0, 1] = float("inf")
    with pytest.raises(NonFiniteError, match=r"inf in step 7.*loss nan.*1 of 4 numbers in the gradient of 0.weight"):
        check_finite([model], gradient_norm(model.parameters()), loss=float("nan"), step=7)


def process(rank: int) -> None:
    model, optimizer = one_weight()
    scaler = LossScaler(LossScale(initial=2.0, hysteresis=1), models=[model])
    for step in range(3):
        # Only one process sees the overflow, as on one shard of a parameter or in one pipeline stage.
        model.weight.grad = torch.full((1, 1), float("inf") if rank == 1 and step != 1 else 2.0)
        scaler.step(optimizer)
        if step < 2:
            scaler.update()
    assert model.weight.item() == 0.0
    with pytest.raises(EngineError, match=r"rank 1: 1 of 1 numbers in the gradient of weight"):
        scaler.update()
    before = copy.deepcopy(scaler.state)
    scaler.load_state_dict(scaler.state_dict())
    assert scaler.state == before


@pytest.mark.slow
def test_all_processes_skip_together() -> None:
    on_ranks(2, process)
