"""Laws 2 and 3 for `piledriver train`: killed anywhere and resumed, on any number of processes, it is the same run."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from piledriver.cli.main import main
from piledriver.core.config import load_config
from piledriver.core.errors import ConfigError
from piledriver.data import open_tokens
from piledriver.data.record import open_segment, read_record, segment_of
from piledriver.models.interchange import load_folder
from piledriver.runtime.world import World
from piledriver.train import TrainConfig, train
from piledriver.train.batching import cut_batch
from tests.checkpoint.processes import Started
from tests.patience import HANG_S

from .corpus import make_tokens
from .runs import ENVIRONMENT, VERB, curve, finish, kill_when, lines_of, start, weights

STEPS = 24
CONFIG = """
model: {{vocab_size: 512, dim: 32, layers: 2, heads: 2, max_positions: 32}}
data: {{tokens: {tokens}}}
batch_tokens: 256
micro_batch_tokens: 64
budget_tokens: {budget}
checkpoint_steps: 4
optimizer: {{lr: 0.01}}
deterministic: true
trackers: []
plots: false
"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("tokens"))


def begin(tokens: Path, out: Path, processes: int = 1, *overrides: str) -> Started:
    return start(CONFIG.format(tokens=tokens, budget=256 * STEPS), out, processes, *overrides)


@pytest.fixture(scope="module")
def undisturbed(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a user runs it, with its imports."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config, out = folder / "config.yaml", folder / "run"
    config.write_text(CONFIG.format(tokens=tokens, budget=256 * STEPS))
    command = [*VERB, "train", str(config), f"out={out}"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(curve(out)) == list(range(1, STEPS + 1))
    return out


@pytest.mark.slow
def test_kill_9_anywhere_and_resume_is_the_same_run(tokens: Path, undisturbed: Path, tmp_path: Path) -> None:
    out, luck, kills = tmp_path / "run", random.Random(3), 0
    while True:
        process, wanted = begin(tokens, out), luck.randint(1, STEPS - 2) * (kills + 1) // 2
        if kills == 3 or not kill_when(process, lambda wanted=wanted: lines_of(out) >= wanted):  # type: ignore[misc]
            assert finish(process) == 0
            break
        kills += 1
    assert kills >= 2
    assert curve(out) == curve(undisturbed), "the same losses, to the last bit"
    assert weights(out) == weights(undisturbed)


@pytest.mark.slow
def test_sigterm_saves_and_says_to_come_back(tokens: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = begin(tokens, out)
    while lines_of(out) < 5:
        time.sleep(0.01)
    process.signal(signal.SIGTERM)
    code = finish(process)
    steps = max(curve(out))
    if code == 75:
        assert any(folder.name == f"step-{steps}" for folder in (out / "checkpoints").iterdir())
        assert finish(begin(tokens, out)) == 0
    assert curve(out) == curve(undisturbed)
    assert weights(out) == weights(undisturbed)


@pytest.mark.slow
def test_a_sharded_model_takes_the_same_steps_and_one_process_can_go_on(
    tokens: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = begin(tokens, out, 2, "layout={zero: 3}")
    kill_when(process, (out / "checkpoints" / "step-8" / "header.json").exists)
    before = curve(out)
    assert list(before.values()) == pytest.approx([curve(undisturbed)[step] for step in before], rel=1e-4)
    oldest, *newer = sorted((out / "checkpoints").glob("step-*"), key=lambda folder: int(folder.name[5:]))
    for folder in newer:  # on a busy machine the kill came late
        shutil.rmtree(folder)
    assert json.loads((oldest / "header.json").read_text())["layout"]["zero"] == 3
    assert finish(begin(tokens, out)) == 0
    assert lines_of(out) > STEPS or len(before) < STEPS, "it went on from there"
    assert list(curve(out).values()) == pytest.approx(list(curve(undisturbed).values()), rel=1e-4)
    record = json.loads((out / "stream.json").read_text())
    assert len(record["segments"]) == 1, "another number of processes reads the same stream"


@pytest.mark.slow
def test_the_launcher_starts_the_verb_on_two_processes(tokens: Path, undisturbed: Path, tmp_path: Path) -> None:
    out, config = tmp_path / "run", undisturbed.parent / "config.yaml"
    words = ["launch", "--nproc", "2", "--module", "piledriver.cli.main", "train", str(config), f"out={out}"]
    done = subprocess.run([*VERB, *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert list(curve(out).values()) == pytest.approx(list(curve(undisturbed).values()), rel=1e-4)


LAYOUTS = ["{zero: 1}", "{zero: 2}", "{zero: 3}", "{tp: 2}", "{pp: 2}", "{cp: 2, cp_method: all-to-all}"]


def on_two(config: str, out: Path, text: str) -> None:
    for number, layout in enumerate(LAYOUTS):
        words = ["train", config, f"out={out}/{number}", "--validation", text, f"layout={layout}", "--debug"]
        assert main(words) == 0

    calls = []

    def asked_on_rank_1(model: Any, world: World) -> dict[str, float]:
        calls.append(1)
        if world.rank == 1 and len(calls) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    settings = load_config(TrainConfig, config, [f"out={out}/stopped", "validate_steps=1", "budget_tokens=4096"])
    stopped = train(settings, validate=asked_on_rank_1)
    assert not stopped.finished
    assert 5 <= stopped.steps < 16, stopped
    assert (out / f"stopped/checkpoints/step-{stopped.steps}").exists(), stopped
    resumed = train(settings)
    assert resumed.finished, resumed


@pytest.mark.slow
def test_every_layout_takes_the_same_steps_validates_and_publishes(
    tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of them on the same processes, tied embeddings and accumulation included; the truth is one process."""
    config, text = tmp_path / "config.yaml", str(tokens.parent / "clean.jsonl.zst")
    config.write_text(CONFIG.format(tokens=tokens, budget=256 * 4))
    assert finish(Started(on_two, str(config), tmp_path, text, output=tmp_path / "output.txt", processes=2)) == 0
    # Options and overrides in any order.
    alone = ["train", str(config), "--validation", text, f"out={tmp_path / 'alone'}", "--json", "trackers=[]"]
    assert main(alone) == 0
    assert json.loads(capsys.readouterr().out)["finished"]
    expected = figures(tmp_path / "alone")
    assert len(expected) == 4
    for number, layout in enumerate(LAYOUTS):
        for row, truth in zip(figures(tmp_path / str(number)), expected, strict=True):
            assert row == pytest.approx(truth, rel=1e-4), layout
        published = load_folder(tmp_path / str(number) / "model")
        for name, weight in load_folder(tmp_path / "alone" / "model").state_dict().items():
            torch.testing.assert_close(published.state_dict()[name], weight, rtol=1e-3, atol=1e-4)
    check_what_watch_reads(tmp_path, expected_ranks=2)


def check_what_watch_reads(folder: Path, expected_ranks: int) -> None:
    """Files beside the metrics: system metrics of every rank, memory by category, the log, samples of whole models."""
    whole = {"alone", *(str(number) for number, layout in enumerate(LAYOUTS) if layout in ("{zero: 1}", "{zero: 2}"))}
    for name in ["alone", *map(str, range(len(LAYOUTS)))]:
        run, ranks = folder / name, 1 if name == "alone" else expected_ranks
        for rank in range(ranks):
            row = json.loads((run / f"ranks/{rank:05d}.jsonl").read_text().splitlines()[-1])
            assert row["step"] == 4
            assert row["host/rss_bytes"] > 0
        metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        assert metrics["memory/parameters_gib"] > 0
        assert metrics["memory/optimizer_gib"] > 0
        assert "step 4/4: loss" in (run / "log.txt").read_text()
        assert (run / "samples.jsonl").exists() == (name in whole), name
    samples = [json.loads(line) for line in (folder / "alone/samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [step for step in (1, 2, 3, 4) for _ in range(len(samples) // 4)]
    assert all(sample["prompt"] and sample["source"] for sample in samples)


def figures(out: Path) -> list[tuple[float, ...]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["gradient_norm"], line["validation/all"]) for line in lines]


REFUSED = [
    (["model=nonesuch"], "unknown model preset 'nonesuch'"),
    (["data={corpus: nowhere}"], "nowhere does not exist"),
    (["data={corpus: %(empty)s}"], "empty.jsonl holds no documents"),
    (["model.vocab_size=300"], "the model has 300 ids"),
    (["bogus=1"], "unknown key 'bogus'"),
    (["budget_tokens=32"], "budget_tokens 32 is less than one step of 256 tokens"),
    (["out=%(empty)s"], "is a file"),
    (["out=%(empty)s/run"], "is a file"),
    (["layout={cp: 2}"], "has no document masks"),
    (["data.seq_len=64"], "data.seq_len 64 is longer than the model's max_positions 32"),
    (["data.seq_len=-1"], "data.seq_len is -1"),
    (["optimizer.lr=-1"], "optimizer.lr is -1.0"),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED, ids=lambda value: str(value)[:24])
def test_what_cannot_be_is_one_line_and_nothing_is_written(
    overrides: list[str], said: str, tokens: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, empty = tmp_path / "config.yaml", tmp_path / "empty.jsonl"
    config.write_text(CONFIG.format(tokens=tokens, budget=256))
    empty.touch()
    changed = [override % {"empty": empty} for override in overrides]
    assert main(["train", str(config), f"out={tmp_path / 'run'}", "--json", *changed]) in (1, 2)
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert said in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "empty.jsonl"]


@pytest.mark.slow
def test_the_trace_names_the_documents_that_were_in_the_batch(
    tokens: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a user asks, with `piledriver trace`; checked against the windows of the step, decoded."""
    token_set = open_tokens(tokens)
    tokenizer = token_set.tokenizer()
    for step in (0, 7, STEPS - 1):
        segment = segment_of(read_record(undisturbed), step)
        windows = open_segment(segment).read_at(np.array(segment.indices(step)))
        assert main(["trace", str(undisturbed), "--step", str(step + 1), "--json"]) == 0
        traced = json.loads(capsys.readouterr().out)
        assert {part["step"] for part in traced} == {step + 1}, "as in metrics.jsonl"
        assert {part["window"] for part in traced} == set(range(8))
        for window in range(8):
            parts = [part for part in traced if part["window"] == window]
            texts = []
            for part in parts:
                (place, *_) = token_set.find(part["document"])
                document = tokenizer.decode_bytes(token_set.document(place.shard, place.row))
                texts.append(document[slice(*part["bytes"])])
            seen = tokenizer.decode_bytes(windows.inputs[window]).split(b"<|endoftext|>")
            assert [text for text in texts if text] == [text for text in seen if text], "all of it, and nothing else"


@pytest.mark.parametrize(
    ("tokens_asked", "processes", "said"),
    [(1000, 1, "use 992"), (32 * 3, 2, "use batch_tokens=128"), (16, 1, "use 32")],
)
def test_a_batch_that_cannot_be_cut_names_the_nearest(tokens_asked: int, processes: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cut_batch(tokens_asked, 32, processes, None, "cpu")
