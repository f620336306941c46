"""A family of another package: data only, found through its entry point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from piledriver.core.errors import ConfigError
from piledriver.models.interchange.families import FAMILIES, UnknownFamilyError, family, family_names

PLUGIN = """
from pathlib import Path

FAMILY = Path(__file__).with_name("mine.yaml")
PRESET = {"vocab_size": 32, "dim": 16, "layers": 1, "heads": 2, "qk_norm": "head", "qkv_bias": True, "tied": False}
"""
FAMILY = """
extends: llama
architecture: MineForCausalLM
config: {qkv_bias: null, out_bias: null, dim: width}
constants: {qk_norm: head, qkv_bias: true}
weights: {embedding.weight: [copy, model.tokens.weight]}
"""
SCRIPT = """
import torch
from piledriver.models import Transformer
from piledriver.models.interchange import load_folder, save_folder
from piledriver.models.presets import preset

model = Transformer(preset("mine-tiny"))
save_folder(model, "out")
again = load_folder("out")
assert again.config == model.config
assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))
"""


@pytest.mark.slow
def test_another_package_adds_a_family_and_a_preset(tmp_path: Path) -> None:
    plugin = tmp_path / "site"
    info = plugin / "plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (plugin / "plugin_module.py").write_text(PLUGIN)
    (plugin / "mine.yaml").write_text(FAMILY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[piledriver.model_family]\nmine = plugin_module:FAMILY\n"
        "[piledriver.model_preset]\nmine-tiny = plugin_module:PRESET\n"
    )
    path = os.pathsep.join([str(plugin), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", SCRIPT]
    ran = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert (written["model_type"], written["width"]) == ("mine", 16)


def test_a_family_extends_another_key_by_key() -> None:
    llama, mistral = family("llama"), family("mistral")
    assert "qkv_bias" in llama.config
    assert "qkv_bias" not in mistral.config, "null removes a key"
    assert mistral.weights == llama.weights
    assert {family(name).name for name in family_names()} == set(FAMILIES)


def test_a_family_is_checked_like_any_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES._loaded, "wrong", {"extends": "llama", "windw": "all"})
    with pytest.raises(ConfigError, match="did you mean 'window'"):
        family("wrong")
    with pytest.raises(UnknownFamilyError, match=r"model_type 'lama' cannot.* use one of apertus, "):
        family("lama")
