"""`piledriver compress`: a folder in, a folder out."""

from __future__ import annotations

import json
from dataclasses import replace
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
        ([model, f"out={folder / 'model' / 'config.json'}", "method=rtn"], "is a file"),
    ):
        assert main(["compress", "quantise", *arguments]) != 0
        assert said in capsys.readouterr().err
    assert main(["compress", "prune", model, f"out={folder / 'q'}", "pattern=2of4", "sparsity=0.9"]) != 0
    assert "sparsity and pattern are given together" in capsys.readouterr().err
    assert not (folder / "q").exists()


def test_a_family_that_cannot_hold_quantised_layers_is_named_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ModelConfig(vocab_size=61, dim=32, layers=1, heads=2, mlp_dim=64, max_positions=32)
    shape = replace(shape, positions="learned", norm="layer", norm_bias=True, mlp="plain", activation="gelu_tanh")
    model = Transformer(replace(shape, qkv_bias=True, out_bias=True, mlp_bias=True))
    save_folder(model, tmp_path / "gpt2", model_type="gpt2")
    out = tmp_path / "q"
    words = [f"model={tmp_path / 'gpt2'}", f"out={out}"]
    assert main(["compress", "quantise", *words, "method=rtn", "scheme=w8a16"]) != 0
    assert "gpt2 stores transformer.h.0.attn.c_attn.weight transposed" in capsys.readouterr().err
    assert not out.exists()
