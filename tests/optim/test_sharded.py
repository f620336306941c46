"""Every optimizer on parameters sharded over two processes does what it does on one."""

from __future__ import annotations

import io

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from piledriver.optim import Muon, OptimizerConfig, build_optimizer, clip_gradients, parameter_groups
from tests.checkpoint.processes import run as on_ranks
from tests.optim.problems import Net, batch

# The last bit of a gradient may round a small state the other way: by a level of its own precision, times the rate.
TOLERANCE = {"adamw8bit": 1e-3, "adamw_bf16": 2e-4}
KINDS = ["adamw", "muon", "lion", "adamw8bit", "adamw_bf16"]


def made(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "muon":
        # In bf16 the iteration turns the last bit of a gradient into another direction.
        return Muon(parameter_groups(model, lr=0.01), dtype=torch.float32)
    return build_optimizer(model, OptimizerConfig(kind=kind, lr=0.01))  # type: ignore[arg-type]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    norms = []
    for step in steps:
        tokens, targets = batch(step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens), targets).backward()
        norms.append(clip_gradients(model.parameters(), 0.5).item())
        optimizer.step()
    return norms


def process(rank: int) -> None:
    for kind in KINDS:
        whole, sharded = Net(), Net()
        fully_shard(sharded.up)
        fully_shard(sharded)
        reference, optimizer = made(kind, whole), made(kind, sharded)
        expected, found = train(whole, reference, range(4)), train(sharded, optimizer, range(4))
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-6, rtol=1e-5)
        # A saved state continues here too, with the states still sharded as the parameters are.
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        again = made(kind, sharded)
        again.load_state_dict(torch.load(file, weights_only=False))
        train(whole, reference, range(4, 7))
        train(sharded, again, range(4, 7))
        for (name, ours), theirs in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            assert isinstance(ours, DTensor)
            difference = (ours.full_tensor() - theirs).abs().max().item()
            assert difference < TOLERANCE.get(kind, 3e-5), f"{kind} {name} differs by {difference}"
            for key, value in again.state[ours].items():
                if key != "step":
                    assert isinstance(value, DTensor), f"{kind} {name} {key}"
                    assert value.full_tensor().shape == reference.state[theirs][key].shape


@pytest.mark.slow
def test_sharded_equals_whole() -> None:
    on_ranks(2, process)
