"""Batch norm under a layout does what it does under torch's DistributedDataParallel."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from piledriver.accelerator import Accelerator
from piledriver.engine import Layout, LayoutError
from piledriver.engine.data_parallel import sync_buffers
from piledriver.runtime.collectives.operations import gather_object
from piledriver.runtime.world import group_world
from tests.checkpoint.processes import run as on_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(2))
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def batch(rank: int, step: int) -> Tensor:
    # Other means on other processes, so that their statistics differ.
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(10 * step + rank)) + rank


def as_ddp_does(rank: int) -> None:
    plain = Net()
    theirs = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        theirs(batch(rank, step)).square().mean().backward()
        optimizer.step()
    for layout in (None, Layout(), Layout(zero=2), Layout(zero=3)):
        run = Accelerator(world=group_world(), layout=layout)
        model = Net()
        model, ours = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            ours.zero_grad()
            run.backward(model(batch(rank, step)).square().mean())
            ours.step()
        found = {name: value.clone() for name, value in run.get_state_dict(model).items()}
        for name, value in plain.state_dict().items():
            if rank == 0 or "running" not in name:
                torch.testing.assert_close(found[name], value, msg=f"{layout} {name}")
        if layout is not None:
            # DDP sends them before a forward, so the last one's are each process's own; ours are alike at once.
            everyone = gather_object(run.world, {name: found[name] for name in found if "running" in name})
            assert all(torch.equal(everyone[0][name], other[name]) for other in everyone for name in other)
            if rank == 0 and layout.zero < 3:
                # A copy is in no group: it waits for nobody.
                copy.deepcopy(model)(batch(rank, 0))
        run.free_memory()


@pytest.mark.slow
def test_statistics_are_the_first_ones() -> None:
    on_ranks(2, as_ddp_does)


def test_pipelines_of_several_copies_refuse_them() -> None:
    mesh: Any = SimpleNamespace(alone=False, reduce_size=2, layout=Layout(pp=2, microbatches=2))
    with pytest.raises(LayoutError, match="running statistics"):
        sync_buffers(Net(), mesh)
    assert sync_buffers(nn.Linear(2, 2), mesh) is not None
