"""Expert parallelism of transformers' own mixtures: losses, gradients and weights of one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from piledriver.accelerator import Accelerator
from piledriver.engine import Layout, LayoutError
from piledriver.engine.expert_parallel.apply import dropped_choices, expert_modules
from piledriver.runtime.world import group_world
from tests.checkpoint.processes import run

pytest.importorskip("transformers")

from tests.engine.fused.catalogue import batch, build

EAGER: dict[str, Any] = {"compile": False, "precision": "fp32"}


def steps(model: nn.Module, accelerator: Accelerator | None, rows: slice) -> list[float]:
    """Three steps of AdamW on a batch of four rows, or on a rank's rows of it."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(3):
        given = batch("mixtral", rows=4, seed=step)
        tokens = given["input_ids"][rows]
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _on_two(rank: int) -> None:
    mine = slice(2 * rank, 2 * rank + 2)
    # Experts with biases; the parity matrix (tests/laws) has those without.
    plain, model = build("gpt-oss"), build("gpt-oss")
    steps(plain, None, slice(0, 4))
    accelerator = Accelerator(world=group_world(), layout=Layout(ep=2, zero=3, fuse=True, **EAGER))
    steps(model, accelerator, mine)
    assert len(expert_modules(model)) == 2
    state = accelerator.get_state_dict(model)
    for key, expected in plain.state_dict().items():
        torch.testing.assert_close(state[key], expected, rtol=1e-3, atol=1e-4, msg=key)
    accelerator.free_memory()
    accelerator = Accelerator(world=group_world(), layout=Layout(ep=2, expert_capacity=1.0, **EAGER))
    model = build("mixtral")
    steps(model, accelerator, mine)
    dropped, choices = dropped_choices(model)
    assert 0 < dropped < choices
    with pytest.raises(LayoutError, match="has biases"):
        Accelerator(world=group_world(), layout=Layout(ep=2, expert_capacity=1.0, **EAGER)).prepare(build("gpt-oss"))
    with pytest.raises(LayoutError, match="nor stacked experts"):
        Accelerator(world=group_world(), layout=Layout(ep=2, **EAGER)).prepare(build("llama"))


@pytest.mark.slow
def test_experts_of_transformers_train_as_in_one_process() -> None:
    run(2, _on_two)


def test_a_capacity_on_one_process_drops_choices() -> None:
    model = build("mixtral")
    original = copy.deepcopy(model)
    accelerator = Accelerator(cpu=True, layout=Layout(expert_capacity=8.0, **EAGER))
    model = accelerator.prepare(model)
    torch.testing.assert_close(model(**batch("mixtral")).loss, original(**batch("mixtral")).loss)
    assert dropped_choices(model)[0] == 0
