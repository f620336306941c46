"""Schedules are functions of progress: bounded, in either unit, and the same through torch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piledriver.core.errors import ConfigError
from piledriver.optim import ScheduleConfig, ScheduledLR, scale_at

KINDS = ["cosine", "linear", "wsd", "inverse_sqrt", "constant"]


@given(
    kind=st.sampled_from(KINDS),
    warmup=st.integers(0, 50),
    length=st.integers(20, 500),
    floor=st.sampled_from([0.0, 0.1]),
)
def test_rises_then_never_rises_again(kind: str, warmup: int, length: int, floor: float) -> None:
    config = ScheduleConfig(kind=kind, warmup=warmup, total=warmup + length, floor=floor)
    values = [scale_at(config, position) for position in range(1, warmup + length + 50)]
    assert all(0.0 <= value <= 1.0 for value in values)
    if warmup:
        assert values[warmup - 1] == pytest.approx(1.0)
    assert all(a <= b for a, b in itertools.pairwise(values[:warmup]))
    after = values[max(warmup, 1) - 1 :]
    assert all(a >= b for a, b in itertools.pairwise(after))
    if kind in ("cosine", "linear", "wsd"):
        assert scale_at(config, config.total) == pytest.approx(floor)
        assert scale_at(config, 10 * config.total) == pytest.approx(floor)


@given(kind=st.sampled_from(KINDS), tokens=st.integers(1, 10_000))
def test_steps_and_tokens_agree(kind: str, tokens: int) -> None:
    steps = ScheduleConfig(kind=kind, warmup=10, total=100, decay=20)
    counted = ScheduleConfig(kind=kind, unit="tokens", warmup=10 * tokens, total=100 * tokens, decay=20 * tokens)
    for step in range(1, 120):
        assert scale_at(counted, step * tokens) == pytest.approx(scale_at(steps, step), abs=1e-12)


def test_known_values() -> None:
    wsd = ScheduleConfig(kind="wsd", warmup=10, total=100, decay=20)
    assert [scale_at(wsd, position) for position in (5, 10, 80, 90, 100)] == [0.5, 1.0, 1.0, 0.5, 0.0]
    root = ScheduleConfig(kind="inverse_sqrt", warmup=100)
    assert [scale_at(root, position) for position in (50, 100, 400, 10_000)] == [0.5, 1.0, 0.5, 0.1]
    assert scale_at(ScheduleConfig(warmup=0, total=100, floor=0.1), 50) == pytest.approx(0.55)


@pytest.mark.parametrize("amount", [1, 64])
def test_torch_scheduler_gives_each_step_its_rate(amount: int) -> None:
    unit = "steps" if amount == 1 else "tokens"
    config = ScheduleConfig(kind="cosine", unit=unit, warmup=4 * amount, total=12 * amount)  # type: ignore[arg-type]

    def rates(stop_at: int | None) -> list[list[float]]:
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        groups = [{"params": [parameters[0]], "lr": 1.0}, {"params": [parameters[1]], "lr": 0.5}]
        optimizer = torch.optim.SGD(groups)
        scheduler = ScheduledLR(optimizer, config, amount=amount)
        found = []
        for step in range(15):
            if step == stop_at:
                state = scheduler.state_dict()
                optimizer = torch.optim.SGD(
                    [{"params": [p], "lr": lr} for p, lr in zip(parameters, (1.0, 0.5), strict=True)]
                )
                scheduler = ScheduledLR(optimizer, config, amount=amount)
                scheduler.load_state_dict(state)
            found.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step()
        return found

    expected = [
        [scale * base for base in (1.0, 0.5)] for scale in (scale_at(config, (s + 1) * amount) for s in range(15))
    ]
    assert rates(None) == expected
    assert rates(7) == expected


def test_impossible_schedules_are_named() -> None:
    with pytest.raises(ConfigError, match="ends within its warmup of 10"):
        ScheduleConfig(kind="cosine", warmup=10, total=10)
    with pytest.raises(ConfigError, match="do not fit in 100"):
        ScheduleConfig(kind="wsd", warmup=50, total=100, decay=60)
    with pytest.raises(ConfigError, match="amount is 5"):
        ScheduledLR(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]), ScheduleConfig(kind="constant"), amount=5)
