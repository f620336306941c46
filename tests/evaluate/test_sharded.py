"""Law 7 for sharded models: bits per byte do not depend on the layout, and each rank reads its own part of a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from piledriver.core.errors import UsageError
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.engine import Layout
from piledriver.evaluate import TransformerScorer, bits_per_byte, open_scorer
from piledriver.evaluate.scorers import Scorer
from piledriver.models import ModelConfig, MoEConfig, Transformer
from piledriver.models.interchange import save_folder
from piledriver.runtime.world import World
from tests.checkpoint.processes import run

from .conftest import DOCUMENTS

DENSE = ModelConfig(vocab_size=320, dim=32, layers=2, heads=4, kv_heads=2, mlp_dim=64, max_positions=16, init_std=0.3)
MODELS = {
    "dense": DENSE,
    "tied": replace(DENSE, tied=True),
    "moe": replace(DENSE, moe=MoEConfig(experts=4, experts_per_token=2)),
}
LAYOUTS = {
    (2, "dense"): [
        Layout(),
        Layout(zero=2),
        Layout(zero=3, compile="blocks"),
        Layout(tp=2),
        Layout(pp=2),
        Layout(cp=2),
    ],
    (2, "tied"): [Layout(tp=2, loss_parallel=False), Layout(pp=2), Layout(zero=3, cp=2, cp_method="all-to-all")],
    (2, "moe"): [Layout(zero=1), Layout(ep=2), Layout(zero=3, ep=2, expert_capacity=1.0), Layout(tp=2), Layout(pp=2)],
    (4, "dense"): [Layout(zero=3, tp=2), Layout(zero=3, pp=2)],
    (4, "tied"): [Layout(cp=2, pp=2)],
    (4, "moe"): [Layout(zero=3, pp=2, ep=2)],
}


def nats(scorer: Scorer, tokenizer: Tokenizer, world: World | None) -> list[float]:
    # Small batches, so that ranks have different numbers of them.
    scores = bits_per_byte(scorer, tokenizer, DOCUMENTS, batch_tokens=32, world=world)
    assert [score.index for score in scores] == list(range(len(DOCUMENTS))), "every document once"
    return [score.nats for score in scores]


def _score(rank: int, folder: str, tokenizer_file: str, expected: dict[str, list[float]]) -> None:
    tokenizer, size = open_tokenizer(tokenizer_file), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, device=torch.device("cpu"), backend="gloo")
    for name in MODELS:
        for layout in LAYOUTS[size, name]:
            scorer = open_scorer(f"{folder}/{name}", layout=layout)
            assert nats(scorer, tokenizer, world) == pytest.approx(expected[name], rel=1e-4, abs=1e-3), layout
            assert isinstance(scorer, TransformerScorer)
            held = sum(parameter.numel() for parameter in _local(scorer._model))
            whole = sum(parameter.numel() for parameter in Transformer(MODELS[name]).parameters())
            if layout.zero == 3 and layout.ep == layout.pp == 1:
                assert held < whole / size * 1.2, "a rank holds its part only"
                with pytest.raises(UsageError, match="cannot decode with a model sharded as"):
                    scorer.greedy([1], 1, lambda _: False)


def _local(model: Transformer) -> list[torch.Tensor]:
    return [one.to_local() if hasattr(one, "to_local") else one for one in model.state_dict().values()]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_every_layout_gives_the_same_figures(size: int, tokenizer_file: Path, tmp_path: Path) -> None:
    tokenizer, expected = open_tokenizer(tokenizer_file), {}
    for name, config in MODELS.items():
        save_folder(Transformer(config, seed=1), tmp_path / name)
        expected[name] = nats(open_scorer(tmp_path / name), tokenizer, None)
    run(size, _score, str(tmp_path), str(tokenizer_file), expected)
