"""A pruned model stays pruned through training, in every layout and across checkpoints of other layouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from piledriver import compress
from piledriver.cli.main import main
from piledriver.core.config import load_config
from piledriver.engine import Layout
from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import load_folder, save_folder
from piledriver.train import TrainConfig, train
from tests.checkpoint.processes import Started

from .corpus import make_tokens
from .runs import finish

CONFIG = """
model: {folder}/sparse
data: {{tokens: {tokens}}}
batch_tokens: 64
budget_tokens: 128
optimizer: {{lr: 0.01}}
out: {folder}/run
keep_zeros: true
trackers: []
plots: false
"""


def chain(path: Path) -> None:
    """Train in one layout after the other; each resumes from the checkpoint of the one before."""
    config = load_config(TrainConfig, str(path))
    layouts = [Layout(zero=1), Layout(zero=3), Layout(tp=2), Layout(zero=2), Layout()]
    for number, layout in enumerate(layouts):
        assert train(replace(config, layout=layout, budget_tokens=128 * (number + 1))).finished


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    shape = ModelConfig(vocab_size=512, dim=32, layers=2, heads=4, kv_heads=2, mlp_dim=64, max_positions=32)
    save_folder(compress.prune(Transformer(shape), "2:4", method="magnitude"), folder / "sparse")
    tokens = make_tokens(folder, documents=40)
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder, tokens=tokens))
    return folder


def zeros(folder: Path) -> dict[str, torch.Tensor]:
    model = load_folder(folder)
    return {name: weight == 0 for name, weight in model.blocks.named_parameters() if weight.dim() > 1}


@pytest.mark.slow
def test_zeros_stay_in_every_layout_and_across_checkpoints(sparse: Path) -> None:
    assert finish(Started(chain, sparse / "config.yaml", output=sparse / "output.txt", processes=2)) == 0
    before, after = zeros(sparse / "sparse"), zeros(sparse / "run" / "model")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert sum(int(mask.sum()) for mask in before.values()) > 0
    old, new = load_folder(sparse / "sparse"), load_folder(sparse / "run" / "model")
    assert not torch.equal(old.blocks["0"].mlp.down.weight, new.blocks["0"].mlp.down.weight)


@pytest.mark.parametrize(
    ("override", "said"),
    [("optimizer.kind=muon", "mixes the weights"), ("model={vocab_size: 512, dim: 32, layers: 1, heads: 2}", "folder")],
)
def test_what_would_fill_zeros_is_refused(
    sparse: Path, tmp_path: Path, override: str, said: str, capsys: pytest.CaptureFixture[Any]
) -> None:
    assert main(["train", str(sparse / "config.yaml"), f"out={tmp_path / 'run'}", "data.seq_len=32", override]) == 2
    assert said in capsys.readouterr().err
