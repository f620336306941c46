"""A run without a learning rate learns, says what was decided, and publishes what transformers reads as we do."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from piledriver.checkpoint.saving.staging import HostStaging
from piledriver.cli.main import main
from piledriver.data import open_tokens
from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import load_folder, save_folder
from piledriver.train.reporting.metrics import read_metrics
from piledriver.train.reporting.plots import loss_plot

from .corpus import make_tokens

CONFIG = """
model: {{vocab_size: 512, dim: 32, layers: 2, heads: 2, max_positions: 32}}
data: {{tokens: {tokens}}}
batch_tokens: 256
budget_tokens: 6144
checkpoint_steps: 24
trackers: []
plots: false
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    (folder / "train.yaml").write_text(CONFIG.format(tokens=make_tokens(folder, documents=60)))
    assert main(["train", str(folder / "train.yaml"), f"out={folder / 'run'}", "--json"]) == 0
    return folder / "run"


def test_the_default_rate_learns_and_every_value_is_recorded(run: Path) -> None:
    losses = [row["loss"] for row in read_metrics(run)]
    assert losses[0] - sum(losses[-4:]) / 4 > 0.5
    resolved = yaml.safe_load((run / "resolved.yaml").read_text())
    assert resolved["optimizer"]["lr"] == yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["lr"] > 1e-3
    assert resolved["run"]["steps"] == 24
    assert resolved["schedule"]["warmup"] >= 1
    assert resolved["layout"]["precision"] in ("fp32", "bf16")

    def values(tree: Any) -> list[Any]:
        return [leaf for part in tree.values() for leaf in values(part)] if isinstance(tree, dict) else [tree]

    assert not {None, "auto"} & {value for value in values(resolved) if not isinstance(value, list)}


def test_transformers_reads_the_published_folder_as_we_do(run: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder, tokens = run / "model", open_tokens(yaml.safe_load((run / "config.yaml").read_text())["data"]["tokens"])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours, text = tokens.tokenizer(), "abc bcd\n  efgh, 12 ü"
    assert tokenizer(text)["input_ids"] == ours.encode(text).tolist()
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    boundary = tokens.boundary
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (boundary, boundary)
    for settings in (model.config, model.generation_config):
        assert (settings.eos_token_id, settings.bos_token_id) == (boundary, boundary)
    ids = torch.tensor([[boundary, *ours.encode(text).tolist()]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, load_folder(folder)(ids), atol=1e-5, rtol=1e-4)


def test_with_everything_on_disk_it_publishes_the_same_without_a_copy_on_the_host(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostStaging, "copies", None)
    tiers = "{optimizer: disk, parameters: disk, gradients: disk, folder: " + str(tmp_path) + "}"
    words = [str(run.parent / "train.yaml"), f"out={tmp_path / 'run'}", f"layout.offload={tiers}", "--json"]
    assert main(["train", *words]) == 0
    assert [row["loss"] for row in read_metrics(tmp_path / "run")] == [row["loss"] for row in read_metrics(run)]
    assert filecmp.cmp(tmp_path / "run" / "model" / "model.safetensors", run / "model" / "model.safetensors", False)


@pytest.mark.parametrize("named", ["", "checkpoints", "checkpoints/step-24"])
def test_a_merged_checkpoint_of_a_run_is_the_published_folder(run: Path, named: str, tmp_path: Path) -> None:
    assert main(["checkpoint", "merge", str(run / named), "-o", str(tmp_path / "merged")]) == 0
    names = sorted(path.name for path in (run / "model").iterdir())
    assert sorted(path.name for path in (tmp_path / "merged").iterdir()) == names
    assert filecmp.cmpfiles(run / "model", tmp_path / "merged", names, shallow=False)[0] == names


def test_merge_copies_config_and_tokenizer_of_another_folder(run: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    save_folder(Transformer(ModelConfig(vocab_size=16, dim=8, layers=1, heads=1)), weights)
    (weights / "config.json").unlink()
    arguments = ["checkpoint", "merge", str(weights), "-o", str(tmp_path / "out"), "--like", str(run / "model")]
    assert main(arguments) == 0
    copied = json.loads((tmp_path / "out/config.json").read_text())
    assert copied == json.loads((run / "model/config.json").read_text())
    assert (tmp_path / "out/tokenizer_config.json").exists()
    assert main([*arguments[:-1], str(tmp_path / "absent")]) == 1


def test_the_first_loss_is_inside_the_plot() -> None:
    pytest.importorskip("matplotlib")
    losses = [9.0, *[3.0 - step / 1000 for step in range(400)]]
    rows = [{"tokens": 10 * step, "loss": loss} for step, loss in enumerate(losses)]
    low, high = loss_plot(rows).axes[0].get_ylim()
    assert low < min(losses)
    assert high > losses[0]
