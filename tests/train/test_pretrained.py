"""Continued pretraining: a Hugging Face folder is the start of a run, and its family the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from piledriver.cli.main import main
from piledriver.models import Transformer
from piledriver.models.interchange import load_folder, read_config, save_folder
from piledriver.train import DataConfig, TrainConfig
from piledriver.train.pretrained import has_same_tokenizer
from piledriver.train.reporting.metrics import read_metrics

from .corpus import make_tokens

GEMMA = {
    "model_type": "gemma2",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 32,
    "sliding_window": 8,
    "bos_token_id": 3,
    "eos_token_id": [1, 107],
    "attention_dropout": 0.25,
}
RUN = ["batch_tokens=256", "trackers=[]", "plots=false", "checkpoint_steps=4", "optimizer.lr=1e-3", "--json"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights, config and tokenizer files, beside its corpus."""
    place = tmp_path_factory.mktemp("pretrained")
    make_tokens(place, documents=60)
    model = Transformer(read_config(GEMMA), seed=7)
    model.source_config = dict(GEMMA)
    save_folder(model, place / "gemma", extra={key: GEMMA[key] for key in ("bos_token_id", "eos_token_id")})
    (place / "gemma/tokenizer.json").write_bytes((place / "tokenizer.json").read_bytes())
    (place / "gemma/tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return place


def test_a_folder_is_trained_on_and_published_as_its_family(folder: Path) -> None:
    out = folder / "run"
    data = f"data={{corpus: {folder / 'clean.jsonl.zst'}, packing: joined}}"
    arguments = ["train", f"model={folder / 'gemma'}", data, f"out={out}", *RUN]
    assert main([*arguments, "budget_tokens=1024"]) == 0
    first = [row["loss"] for row in read_metrics(out)]

    # The first loss is that of the folder's model, on the tokens of the folder's tokenizer.
    fresh = ["train", f"model={folder / 'gemma'}", data, f"out={folder / 'twin'}", *RUN, "seed=1"]
    assert main([*fresh, "budget_tokens=256"]) == 0
    assert read_metrics(folder / "twin")[0]["loss"] == pytest.approx(first[0], rel=0.05)
    assert not (out / "tokenizer.json").exists(), "no tokenizer is trained"

    written = json.loads((out / "model/config.json").read_text())
    assert {key: written[key] for key in GEMMA} == GEMMA
    kept = json.loads((out / "model/tokenizer_config.json").read_text())
    assert kept == {"chat_template": "{{ messages }}"}
    before, after = load_folder(folder / "gemma"), load_folder(out / "model")
    assert before.config == after.config
    moved = [(a - b).abs().max() for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert 0 < max(moved) < 0.1, "four small steps from the weights of the folder"

    # It resumes from its checkpoint, not from the folder.
    assert main([*arguments, "budget_tokens=2048"]) == 0
    again = [row["loss"] for row in read_metrics(out)]
    assert again[:4] == first
    assert len(again) == 8


def test_the_initial_weights_are_those_of_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = torch.arange(32)[None]
    out = folder / "still"
    data = f"data={{tokens: {folder / 'tokens'}}}"
    arguments = ["train", f"model={folder / 'gemma'}", data, f"out={out}", "budget_tokens=256", *RUN]
    assert main([*arguments, "optimizer.lr=1e-30"]) == 0
    with torch.no_grad():
        assert torch.equal(load_folder(out / "model")(tokens), load_folder(folder / "gemma")(tokens))
    assert "another tokenizer" not in capsys.readouterr().err


def test_equal_tokenizer_files_are_not_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("piledriver.data.tokens.token_set.open_tokenizer")
    data = DataConfig(tokens=str(folder / "tokens"))
    config = TrainConfig(model=str(folder / "gemma"), data=data, batch_tokens=256, budget_tokens=256, out="unused")
    assert has_same_tokenizer(config, folder / "tokens")


def test_shards_of_another_tokenizer_are_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "other").mkdir()
    other = make_tokens(folder / "other", documents=20)  # too few for the same merges
    arguments = ["train", f"model={folder / 'gemma'}", f"data={{tokens: {other}}}", f"out={folder / 'said'}"]
    assert main([*arguments, "budget_tokens=256", *RUN]) == 0
    assert f"were made with another tokenizer than that of {folder / 'gemma'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model=%(folder)s/nowhere", "which holds no config.json"),
        ("model=%(folder)s/bare", "holds no tokenizer. Fix: set data.tokenizer"),
    ],
)
def test_what_is_missing_is_named(
    folder: Path, change: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = folder / "bare"
    bare.mkdir(exist_ok=True)
    (bare / "config.json").write_text(json.dumps(GEMMA))
    data = f"data={{corpus: {folder / 'clean.jsonl.zst'}}}"
    arguments = ["train", change % {"folder": folder}, data, f"out={tmp_path / 'run'}", "budget_tokens=256", *RUN]
    assert main(arguments) != 0
    assert message in capsys.readouterr().err
