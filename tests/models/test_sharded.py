"""A model that is born sharded starts as a whole one does, and reads the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from piledriver.models import Transformer, initialise
from piledriver.models.interchange import load_folder, load_weights, save_folder
from piledriver.models.presets import preset
from tests.checkpoint.processes import run as on_ranks

CONFIG = preset("tiny-moe", layers=2, vocab_size=64, dim=32, heads=4, mlp_dim=48)


def process(rank: int, folder: str) -> None:
    with torch.device("meta"):
        sharded = Transformer(CONFIG)
    for block in sharded.blocks.values():
        fully_shard(block)
    fully_shard(sharded)
    sharded.to_empty(device="cpu")
    initialise(sharded, seed=5)
    whole = Transformer(CONFIG, seed=5)
    same(sharded, whole)

    tokens = torch.arange(24).view(2, 12)
    ours, theirs = sharded(tokens, tokens), whole(tokens, tokens)
    torch.testing.assert_close(ours.total, theirs.total)
    ours.total.backward()
    theirs.total.backward()
    for (name, a), b in zip(sharded.named_parameters(), whole.parameters(), strict=True):
        assert isinstance(a.grad, DTensor)
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, msg=name, atol=1e-4, rtol=1e-4)

    load_weights(sharded, f"{folder}/checkpoint")
    same(sharded, load_folder(f"{folder}/checkpoint"))
    save_folder(sharded, f"{folder}/rank{rank}")
    same(sharded, load_folder(f"{folder}/rank{rank}"))


def same(sharded: Transformer, whole: Transformer) -> None:
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), whole.get_parameter(name)), name


@pytest.mark.slow
def test_born_sharded(tmp_path: Path) -> None:
    save_folder(Transformer(CONFIG, seed=9), tmp_path / "checkpoint")
    on_ranks(2, process, str(tmp_path))
