"""On a CUDA device: the loss with a split vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from piledriver.engine.shards.collectives import Group
from piledriver.engine.tensor_parallel.vocab_parallel_loss import vocab_parallel_cross_entropy
from piledriver.models.loss import linear_cross_entropy
from tests.engine.gpu import ON_GPU

pytestmark = ON_GPU


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Group]:
    here = {"rank": 0, "world_size": 1, "device_id": torch.device("cuda", 0)}
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", **here)
    yield Group(str(dist.group.WORLD.group_name), 1, 0)
    dist.destroy_process_group()


def test_a_split_vocabulary_gives_the_same_loss(alone: Group) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(512, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(1000, 64, device="cuda", requires_grad=True)
    targets = torch.randint(1000, (512,), device="cuda")
    targets[:9] = -100
    options = {"z_loss": 1e-3, "softcap": 20.0}
    wanted = linear_cross_entropy(hidden, weight, targets, **options, chunk_tokens=0)
    wanted_grads = torch.autograd.grad(wanted.total / 503, (hidden, weight))
    found = vocab_parallel_cross_entropy(hidden, weight, targets, first=0, group=alone, chunk_tokens=100, **options)
    grads = torch.autograd.grad(found.total / 503, (hidden, weight))
    torch.testing.assert_close(found.total, wanted.total, rtol=1e-3, atol=0)
    for mine, theirs in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02 * theirs.abs().max().item())
