"""Every optimizer on parameters sharded over two processes does what it does on one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from piledriver.optim import OptimizerConfig, build_optimizer, clip_gradients
from tests.optim.problems import Net, batch

KINDS = ["adamw", "muon", "lion", "adamw8bit", "adamw_bf16"]


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    norms = []
    for step in steps:
        tokens, targets = batch(step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens), targets).backward()
        norms.append(clip_gradients(model.parameters(), 0.5).item())
        optimizer.step()
    return norms


def process(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.set_num_threads(1)
    for kind in KINDS:
        config = OptimizerConfig(kind=kind, lr=0.01)  # type: ignore[arg-type]
        whole, sharded = Net(), Net()
        fully_shard(sharded.up)
        fully_shard(sharded)
        reference, optimizer = build_optimizer(whole, config), build_optimizer(sharded, config)
        expected, found = train(whole, reference, range(4)), train(sharded, optimizer, range(4))
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-6, rtol=1e-5)
        # A saved state continues here too, with the states still sharded as the parameters are.
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        again = build_optimizer(sharded, config)
        again.load_state_dict(torch.load(file, weights_only=False))
        train(whole, reference, range(4, 7))
        train(sharded, again, range(4, 7))
        for (name, ours), theirs in zip(sharded.named_parameters(), whole.parameters(), strict=True):
            assert isinstance(ours, DTensor)
            torch.testing.assert_close(ours.full_tensor(), theirs, atol=1e-5, rtol=1e-4, msg=f"{kind} {name}")
            for key, value in again.state[ours].items():
                if key != "step":
                    assert isinstance(value, DTensor), f"{kind} {name} {key}"
                    assert value.full_tensor().shape == reference.state[theirs][key].shape
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_equals_whole(tmp_path: Path) -> None:
    mp.spawn(process, args=(str(tmp_path),), nprocs=2)
