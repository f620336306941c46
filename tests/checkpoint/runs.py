"""A small training run with everything that a checkpoint holds, plain or sharded, the same on any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from piledriver.checkpoint import Contents


class Counter:
    """A custom object."""

    def __init__(self) -> None:
        self.seen = 0
        self.average = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "average": self.average, "shape": (1, 2), 7: {"x"}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["shape"] == (1, 2)
        assert state[7] == {"x"}
        self.seen, self.average = state["seen"], state["average"]


@dataclass
class Run:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    counter: Counter

    @property
    def contents(self) -> Contents:
        return Contents(
            models=[self.model], optimizers=[self.optimizer], schedulers=[self.scheduler], custom=[self.counter]
        )


def cpu_mesh() -> DeviceMesh:
    """All ranks in a row, on the host also where there is a GPU."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def make_run(seed: int, *, sharded: bool = False) -> Run:
    """Odd sizes, so that shards are uneven and some ranks hold nothing of a tensor; a tied weight; a buffer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 5), nn.Linear(5, 7, False))
    model.register_buffer("scale", torch.tensor(0.5 + seed))
    if sharded:
        mesh = cpu_mesh()
        for layer in (model[1], model[3]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model[4].weight = model[0].weight
    groups = [{"params": list(model[:3].parameters())}, {"params": list(model[3].parameters()), "lr": 0.02}]
    groups += [{"params": [model[4].weight]}] if sharded else []
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    return Run(model, optimizer, scheduler, Counter())


def train(run: Run, steps: int, start: int = 0) -> list[float]:
    """Every rank sees the same batch, so any number of ranks does the same."""
    losses = []
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(0, 7, (16,), generator=generator)
        loss = nn.functional.cross_entropy(run.model(words), words.roll(1))
        loss.backward()
        if dist.is_initialized() and not any(isinstance(p, DTensor) for p in run.model.parameters()):
            for parameter in run.model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(dist.get_world_size())
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.scheduler.step()
        run.counter.seen += 1
        losses.append(loss.item())
    return losses


def whole(run: Run) -> dict[str, torch.Tensor]:
    """Every tensor of the model and the optimizer, unsharded."""
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    found = dict(run.model.state_dict())
    for parameter, state in run.optimizer.state.items():
        found |= {f"{names[id(parameter)]}/{key}": value for key, value in state.items()}
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for key, value in found.items()
    }
