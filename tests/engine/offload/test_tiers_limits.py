"""A run on disk that is killed in a step resumes from its checkpoint; a model larger than its memory limit trains."""

from __future__ import annotations

import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from piledriver.checkpoint import Contents, load, save
from piledriver.engine import Layout, Offload
from piledriver.engine.apply import apply, apply_optimizer
from piledriver.engine.mesh import make_mesh
from piledriver.engine.offload.stepping import block_step
from piledriver.engine.optimizer.parameter_map import ParameterMap
from piledriver.models import ModelConfig, Transformer
from tests.checkpoint.processes import run as on_ranks

TOKENS = torch.randint(64, (4, 2, 9), generator=torch.Generator().manual_seed(0))
SMALL = ModelConfig(vocab_size=64, dim=64, layers=2, heads=2)
# 205 million bytes of fp32 weights, in blocks of 3.2 million.
LARGE = ModelConfig(vocab_size=64, dim=224, layers=64, heads=2)


def make(config: ModelConfig, offload: Any) -> tuple[Any, Any]:
    layout = Layout(offload=offload)
    with torch.device("meta"):
        model: Any = Transformer(config)
    optimizer, mesh, parameters = (
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        make_mesh(layout, "cpu"),
        ParameterMap(),
    )
    before = dict(model.named_parameters())
    model = apply(model, mesh, device=torch.device("cpu"), weights=0)
    parameters.record(model, before)
    apply_optimizer(optimizer, mesh, parameters)
    return model, optimizer


def train(made: tuple[Any, Any], steps: range) -> list[float]:
    model, optimizer = made
    seen = []
    for step in steps:
        sums = model(TOKENS[step, :, :-1], targets=TOKENS[step, :, 1:])
        loss = sums.total / sums.tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def die_in_a_step(rank: int, tier: str, checkpoint: str) -> None:
    made = make(SMALL, Offload(optimizer="disk", folder=tier, buffer_bytes=1 << 16))
    train(made, range(2))
    save(checkpoint, Contents(models=[made[0]], optimizers=[made[1]], rng=False))
    original, blocks = block_step.StepRun.compute, []

    def compute(run: Any, block: Any) -> None:
        original(run, block)
        blocks.append(block)
        if len(blocks) == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    block_step.StepRun.compute = compute  # type: ignore[method-assign]
    train(made, range(2, 3))


def resume(rank: int, tier: str, checkpoint: str) -> list[float]:
    made = make(SMALL, Offload(optimizer="disk", folder=tier, buffer_bytes=1 << 16))
    load(checkpoint, Contents(models=[made[0]], optimizers=[made[1]], rng=False))
    return train(made, range(2, 4))


@pytest.mark.slow
def test_a_run_that_is_killed_in_a_step_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    tier, checkpoint = tmp_path / "tier", str(tmp_path / "checkpoint")
    tier.mkdir()
    on_ranks(1, die_in_a_step, str(tier), checkpoint, dying=[0])
    assert list(tier.iterdir()) == []
    (found,) = on_ranks(1, resume, str(tier), checkpoint)
    assert found == train(make(SMALL, "none"), range(4))[2:]
    assert list(tier.iterdir()) == []


def private_bytes() -> int:
    """Bytes of anonymous memory of this process; pages of files that it maps are not its own."""
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def step_and_look(offload: Any) -> list[float]:
    """The loss before and after one step."""
    torch.set_num_threads(1)
    model, optimizer = make(LARGE, offload)
    tokens = TOKENS[0, :1, :5]
    losses = []
    for _ in range(2):
        sums = model(tokens[:, :-1], targets=tokens[:, 1:])
        losses.append((sums.total / sums.tokens).item())
        if len(losses) == 1:
            sums.total.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses


def step_with_little_memory(rank: int, tier: str) -> tuple[list[float], int]:
    small = Offload(optimizer="disk", parameters="disk", gradients="step", folder=tier)
    train(make(SMALL, small), range(1))
    before, peak, ended = private_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    losses = step_and_look(replace(small, buffers=2, buffer_bytes=1 << 20))
    ended.set()
    watcher.join()
    return losses, peak - before


def step_with_room(rank: int) -> list[float]:
    return step_and_look("optimizer")


@pytest.mark.slow
def test_a_model_four_times_larger_than_its_memory_trains(tmp_path: Path) -> None:
    ((found, peak),) = on_ranks(1, step_with_little_memory, str(tmp_path))
    assert [found] == on_ranks(1, step_with_room)
    assert found[1] != found[0]
    weights = 4 * 16 * LARGE.dim**2 * LARGE.layers
    assert peak < weights / 4, (peak, weights)
