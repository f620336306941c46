"""Which modules count as blocks."""

from __future__ import annotations

import torch
from torch import nn

from piledriver.engine.blocks import blocks_of
from piledriver.models import ModelConfig, Transformer


class Half(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        # Experts repeat too, but inside a block.
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(4, 16), "experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(8))})
            for _ in range(layers)
        )
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))


def test_our_models_and_a_stage_of_one() -> None:
    with torch.device("meta"):
        model = Transformer(ModelConfig(vocab_size=32, dim=16, layers=3, heads=2))
    assert list(blocks_of(model)) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(blocks_of(nn.ModuleDict({"policy": model}))) == [f"policy.blocks.{i}" for i in range(3)]
    for name in ("0", "1"):
        del model.blocks[name]
    assert list(blocks_of(model)) == ["blocks.2"]


def test_lists_of_other_models() -> None:
    assert list(blocks_of(Half(3))) == ["layers.0", "layers.1", "layers.2"]
    assert list(blocks_of(Half(1))) == ["layers.0"]
    both = nn.ModuleDict({"encoder": Half(2), "decoder": Half(3)})
    assert [name.rsplit(".", 1)[0] for name in blocks_of(both)] == ["encoder.layers"] * 2 + ["decoder.layers"] * 3
    assert blocks_of(nn.Linear(2, 2)) == {}
    assert blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) == {}
