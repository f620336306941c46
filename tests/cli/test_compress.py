"""`piledriver compress`: a folder in, a folder out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from piledriver.cli.main import main
from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import load_folder, save_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shape = ModelConfig(vocab_size=61, dim=32, layers=1, heads=2, mlp_dim=64, max_positions=32)
    save_folder(Transformer(shape), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    return tmp_path


def test_verbs_write_folders_that_load(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = [f"model={folder / 'model'}", "method=rtn"]
    assert main(["compress", "quantise", *common, f"out={folder / 'q'}", "scheme=w4a16-g32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scheme"] == "w4a16-g32"
    assert main(["compress", "prune", common[0], "method=magnitude", f"out={folder / 'p'}", "pattern=2of4"]) == 0
    assert "50.0% zeros" in capsys.readouterr().out
    tokens = torch.tensor([[1, 2, 3]])
    for name in ("q", "p"):
        assert load_folder(folder / name)(tokens).shape == (1, 3, 61)
        assert (folder / name / "tokenizer.json").exists()


def test_wrong_configs_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"model={folder / 'model'}"
    for arguments, said in (
        ([model, f"out={folder / 'model'}"], "another folder"),
        ([model, f"out={folder / 'q'}"], "needs calibration"),
        ([model, f"out={folder / 'q'}", "method=rtn", "scheme=w2"], "no scheme"),
    ):
        assert main(["compress", "quantise", *arguments]) != 0
        assert said in capsys.readouterr().err
