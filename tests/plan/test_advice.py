"""Advice: each rule speaks of the cause that was built in, with its number, and predicts what is left without it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from piledriver.observe import Report, profile_step, region
from piledriver.observe.report.values import Advice
from piledriver.plan.advice.advise import RULES, advise
from piledriver.plan.hardware.catalog import make_cluster


def model_and_step(wait: Callable[[], Any]) -> tuple[nn.Module, Any, Callable[[], None]]:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(64, 64)

    def step() -> None:
        wait()
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def waiting(name: str) -> Callable[[], None]:
    def wait() -> None:
        with region(name):
            time.sleep(0.05)

    return wait


@pytest.fixture(scope="module")
def plain() -> Report:
    model, optimizer, step = model_and_step(lambda: None)
    return profile_step(step, model, [optimizer])


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("loader", "slow loader"),
        ("checkpoint", "checkpoint stall"),
        ("tokeniser", "tokeniser in the loop"),
        ("tracker", "tracker"),
    ],
)
def test_the_part_that_a_step_waits_for_is_named_first(name: str, rule: str) -> None:
    model, optimizer, step = model_and_step(waiting(name))
    report = profile_step(step, model, [optimizer], warm_up=1, steps=2)
    first, *_ = advise(report)
    assert first.rule == rule
    assert first.predicted_seconds < first.step_seconds - 0.04 or rule == "slow loader"


def test_there_are_fifteen_rules_and_each_says_what_it_is_about() -> None:
    assert len(RULES) >= 15
    assert all(rule.__doc__ for rule in RULES)


def changed(report: Report, seconds: dict[str, float], **facts: Any) -> list[Advice]:
    """Advice for a report with other facts, as if its steps had run on an H100."""
    rank = report.ranks[0]
    before = dict(rank.facts), dict(rank.seconds), rank.wall_seconds
    rank.facts.update(facts)
    rank.seconds = dict.fromkeys(rank.seconds, 0.0) | seconds
    rank.wall_seconds = sum(seconds.values())
    try:
        return advise(report, make_cluster("h100-80g", 1))
    finally:
        rank.facts, rank.seconds, rank.wall_seconds = before


def test_rules_of_the_device(plain: Report) -> None:
    shape = {"m": 8192, "n": 8192, "k": 8192, "groups": 1, "precision": "float32", "calls": 3, "seconds": 0.09}
    found = changed(plain, {"compute": 0.1}, kernels=30, kernel_median_us=900, shapes=[shape])
    assert found[0].rule == "fp32 products"
    # Three products of 8192 take less than 3 ms in bf16 on an H100.
    assert found[0].predicted_seconds * plain.ranks[0].steps < 0.03
    found = changed(plain, {"compute": 0.02, "host_wait": 0.08}, kernels=9000, kernel_median_us=3.0, shapes=[])
    assert found[0].rule == "tiny kernels"
    # A graph starts 9,000 kernels a microsecond apart: 9 of the 80 ms stay.
    assert found[0].gain == pytest.approx(100 / 29)
    found = changed(
        plain,
        {"compute": 0.05, "host_wait": 0.05},
        kernels=300,
        kernel_median_us=100.0,
        shapes=[],
        synchronisations=30,
        synchronised_by={"aten::item": 30},
        synchronised_seconds=0.06,
    )
    assert found[0].rule == "host synchronisation"
    assert "aten::item" in found[0].evidence
    assert found[0].gain == pytest.approx(2)
    counts = {"device_mallocs": 60, "device_frees": 60, "retries": 1}
    found = changed(
        plain, {"compute": 0.05, "host_wait": 0.05}, kernels=300, kernel_median_us=100, allocator=counts,
        malloc_seconds=0.05, shapes=[],
    )  # fmt: skip
    assert found[0].rule == "memory fragmentation"


def test_a_loop_without_waste_gets_no_advice_about_waste(plain: Report) -> None:
    rules = {one.rule for one in advise(plain)}
    assert not rules & {"slow loader", "checkpoint stall", "padding", "straggler", "micro-batch", "recompilation"}
