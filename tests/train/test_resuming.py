"""A run's folder goes on with its own config only, and what is damaged in it is named, not passed over."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from piledriver.checkpoint import latest
from piledriver.cli.main import main
from piledriver.core.config import load_config
from piledriver.optim import scale_at
from piledriver.train import TrainConfig
from piledriver.train.budget import default_schedule
from piledriver.train.reporting.metrics import read_metrics

from .corpus import make_tokens

STEPS = 6
CONFIG = """
model: {{vocab_size: 512, dim: 32, layers: 1, heads: 2, max_positions: 32}}
data: {{tokens: {tokens}}}
batch_tokens: 64
budget_tokens: {budget}
checkpoint_steps: 2
optimizer: {{lr: 0.01}}
trackers: []
plots: false
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and the run that was made of it."""
    folder = tmp_path_factory.mktemp("finished")
    config = CONFIG.format(tokens=make_tokens(folder, documents=40), budget=64 * STEPS)
    (folder / "config.yaml").write_text(config)
    assert main(["train", str(folder / "config.yaml"), f"out={folder / 'run'}", "--json"]) == 0
    return folder


def files_of(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.heads=4", "model.heads=2, not 4"),
        ("optimizer.kind=lion", "optimizer.kind=adamw, not lion"),
        ("optimizer.lr=0.1", "optimizer.lr=0.01, not 0.1"),
        ("batch_tokens=128", "batch_tokens=64, not 128"),
        ("data.seq_len=16", "data.seq_len=32, not 16"),
        ("data.packing=joined", "data.packing=packed, not joined"),
        ("seed=1", "seed=0, not 1"),
        ("budget_tokens=128", "is 2 steps, but"),
    ],
)
def test_another_config_is_refused_and_the_run_stays_as_it_was(
    override: str, said: str, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(finished / "run")
    assert main(["train", str(finished / "config.yaml"), f"out={finished / 'run'}", override]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert said in error
    assert files_of(finished / "run") == before


def test_a_finished_run_says_how_it_ended_and_can_be_prolonged(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished / "run", out)
    assert main(["train", str(finished / "config.yaml"), f"out={out}", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["steps"], again["finished"]) == (STEPS, True)
    assert again["loss"] == read_metrics(out)[-1]["loss"]
    assert main(["train", str(finished / "config.yaml"), f"out={out}", f"budget_tokens={64 * (STEPS + 2)}"]) == 0
    assert read_metrics(out)[-1]["step"] == STEPS + 2


def test_the_last_checkpoint_is_looked_for_once(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every look reads all headers from the last one down: on a slow disk that is felt."""
    looks: list[str] = []

    def counted(root: Path) -> Path | None:
        looks.append(str(root))
        return latest(root)

    monkeypatch.setattr("piledriver.train.resume.latest", counted)
    out = Path(shutil.copytree(finished / "run", tmp_path / "run"))
    longer = f"budget_tokens={64 * (STEPS + 2)}"
    assert main(["train", str(finished / "config.yaml"), f"out={out}", longer, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == STEPS + 2
    assert len(looks) == 1


def test_the_learning_rate_in_the_metrics_is_that_of_the_step(finished: Path) -> None:
    schedule = default_schedule(STEPS)
    lr = load_config(TrainConfig, finished / "config.yaml").optimizer.lr
    expected = [lr * scale_at(schedule, step) for step in range(1, STEPS + 1)]
    assert [row["learning_rate"] for row in read_metrics(finished / "run")] == pytest.approx(expected)


@pytest.mark.parametrize("part", ["header.json", "state.json", "index.json", "rank-00000.safetensors"])
def test_a_damaged_checkpoint_is_named_with_what_to_do(
    part: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished / "run", out)
    (path,) = (out / "checkpoints" / f"step-{STEPS}").rglob(part)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    longer = ["train", str(finished / "config.yaml"), f"out={out}", f"budget_tokens={64 * (STEPS + 1)}", "--json"]
    assert main(longer) == 1
    error = capsys.readouterr().err
    assert f"step-{STEPS}" in error
    assert "the run then resumes from step-4" in error
    shutil.rmtree(out / "checkpoints" / f"step-{STEPS}")
    assert main(longer) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == STEPS + 1


def test_when_every_checkpoint_is_damaged_nothing_begins_again_by_itself(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(finished / "run", out)
    for path in out.glob("checkpoints/*/header.json"):
        path.write_bytes(path.read_bytes()[:50])
    assert main(["train", str(finished / "config.yaml"), f"out={out}"]) == 1
    assert "is damaged" in capsys.readouterr().err


def test_damaged_tokens_and_metrics(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = shutil.copytree(finished / "tokens", tmp_path / "tokens")
    (path,) = tokens.glob("*.tokens.npy")
    content = bytearray(path.read_bytes())
    content[200:] = b"\xff" * (len(content) - 200)
    path.write_bytes(content)
    verb = ["train", str(finished / "config.yaml"), f"out={tmp_path / 'run'}"]
    assert main([*verb, f"data.tokens={tokens}"]) == 1
    assert f"{path} is damaged: its checksum differs" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run")
    shutil.copytree(finished / "run", tmp_path / "run")
    with open(tmp_path / "run" / "metrics.jsonl", "ab") as file:
        file.write(b'\xff\xfe{"step": 3}\n12\n{"loss": 1}\n')
    assert main(verb) == 0
    assert len(read_metrics(tmp_path / "run")) == STEPS


@pytest.mark.parametrize(
    "content", [b'{"format": "piledriver-skipped", "version": 1, "skipped": [\xff]}', b"[]", b"{}", b""]
)
def test_a_damaged_list_of_skipped_batches_is_named(
    content: bytes, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Path(shutil.copytree(finished / "run", tmp_path / "run"))
    (out / "skipped.json").write_bytes(content)
    assert main(["train", str(finished / "config.yaml"), f"out={out}"]) == 1
    assert f"{out / 'skipped.json'} is damaged" in capsys.readouterr().err


def test_overrides_alone_are_a_config(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["model={vocab_size: 512, dim: 16, layers: 1, heads: 2, max_positions: 32}", "batch_tokens=64"]
    given += [f"data.tokens={finished / 'tokens'}", "budget_tokens=128", f"out={tmp_path / 'run'}", "trackers=[]"]
    assert main(["train", *given, "--json"]) == 0  # two steps, with their plots
    assert math.isfinite(json.loads(capsys.readouterr().out)["loss"])
    assert (tmp_path / "run" / "plots" / "loss.png").exists()


def test_a_tokenizer_that_is_too_large_is_refused_before_it_is_used(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = finished / "clean.jsonl.zst"
    data = f"data={{corpus: {text}, tokenizer: {finished / 'tokenizer.json'}}}"
    verb = ["train", str(finished / "config.yaml"), f"out={tmp_path / 'run'}", data, "model.vocab_size=300"]
    assert main(verb) == 2
    assert "the model has 300 ids, the tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_model_without_room_and_a_tokenizer_that_is_damaged(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb = ["train", str(finished / "config.yaml"), f"out={tmp_path / 'run'}"]
    assert main([*verb, "model.vocab_size=9999999999999999"]) == 1
    assert "this rank's part of 3.2e+17 parameters does not fit into memory" in capsys.readouterr().err
    tokens = Path(shutil.copytree(finished / "tokens", tmp_path / "tokens"))
    (tokens / "tokenizer.json").write_bytes(b"{}")  # it would be published with the model
    assert main([*verb, f"data.tokens={tokens}"]) == 1
    assert f"{tokens / 'tokenizer.json'} is damaged" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_shape_that_no_family_has_is_trained_and_said_so(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", str(finished / "config.yaml"), f"out={out}", "model.attention_softcap=30.0", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["finished"]
    assert "model will not be written" in said.err
    assert "attention_softcap" in said.err
    assert not (out / "model").exists()
