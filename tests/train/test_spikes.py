"""Batches that go wrong: seen, counted, gone back from; and law 2 holds with roll-backs, whenever the run is killed."""

from __future__ import annotations

import json
import math
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.core.errors import ConfigError, PiledriverError
from piledriver.data import trace_step
from piledriver.data.record import open_segment, read_record
from piledriver.models import ModelConfig, Transformer
from piledriver.optim import OptimizerConfig
from piledriver.runtime.world import World
from piledriver.train import DataConfig, SpikeConfig, TrainConfig, train
from piledriver.train.reporting.metrics import read_metrics
from piledriver.train.spikes.detect import SpikeWatch

from .corpus import POISON, make_tokens
from .runs import curve, finish, kill_when, start, weights

STEPS = 72
CONFIG = """
model: {{vocab_size: 512, dim: 32, layers: 1, heads: 2, max_positions: 32}}
data: {{tokens: {tokens}}}
batch_tokens: 64
budget_tokens: {budget}
checkpoint_steps: 24
optimizer: {{lr: 0.01}}
deterministic: true
trackers: []
plots: false
spikes: {{action: rollback, factor: 1.0, warmup_steps: 40, snapshot_steps: 4}}
"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("tokens"), poison=2)


def skipped(out: Path) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads((out / "skipped.json").read_text())["skipped"]
    return entries


def sources_of(run: Path, windows: range) -> set[str]:
    """Whose tokens some windows of the run's stream hold, by decoding them."""
    stream = open_segment(read_record(run)[0])
    text = stream.tokens.tokenizer().decode(stream.read_at(np.array(windows)).inputs.flatten())
    return {POISON if any("\u4e00" <= character <= "\u9fff" for character in text) else "other"}


@pytest.mark.slow
def test_a_run_that_went_back_and_was_killed_leaves_out_the_same_batches(tokens: Path, tmp_path: Path) -> None:
    config = CONFIG.format(tokens=tokens, budget=64 * STEPS)
    whole, killed, stopped = (tmp_path / name / "run" for name in ("whole", "killed", "stopped"))
    assert finish(start(config, whole)) == 0
    left_out = skipped(whole)
    assert len(left_out) >= 2
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    back = [line for line in lines if "rolled_back_to" in line]
    assert [line["step"] for line in back] == [entry["seen_at"] for entry in left_out]
    assert lines[-1]["skipped_batches"] == sum(entry["batches"] for entry in left_out)
    taken = [part for step in range(STEPS) for part in trace_step(whole, step)]
    for entry in left_out:
        windows = range(entry["window"], entry["window"] + entry["windows"])
        assert POISON in sources_of(whole, windows)
        assert not any(part.index in windows for part in taken), "the trace knows that they were passed over"

    # kill -9 once it has gone back; what it resumes from is older than what it went back to
    assert kill_when(start(config, killed), (killed / "skipped.json").exists)
    assert finish(start(config, killed)) == 0
    # SIGTERM between two snapshots: it saves where it could have gone back to
    process = start(config, stopped)
    while not (stopped / "metrics.jsonl").exists() or max(curve(stopped), default=0) < 42:
        time.sleep(0.01)
    process.signal(signal.SIGTERM)
    if finish(process) == 75:
        saved = max(int(folder.name.split("-")[1]) for folder in (stopped / "checkpoints").iterdir())
        assert saved % 4 == 0
        assert finish(start(config, stopped)) == 0
    for other in (killed, stopped):
        assert skipped(other) == left_out
        assert curve(other) == curve(whole), "the same losses, to the last bit"
        assert weights(other) == weights(whole)


class InPython:
    """The rule of `SpikeWatch`, one number at a time."""

    def __init__(self, config: SpikeConfig) -> None:
        self.config, self.count, self.spread = config, 0, 0.0
        self.mean: float | None = None

    def judge(self, step: int, loss: float, norm: float) -> bool:
        if not math.isfinite(loss) or not math.isfinite(norm):
            self.count += 1
            return True
        if self.mean is None:
            self.mean, self.spread = loss, 0.1 * abs(loss)
            return False
        limit = self.mean + self.config.factor * max(3 * self.spread, 0.2 * abs(self.mean))
        if step >= self.config.warmup_steps and loss > limit:
            self.count += 1
            return True
        self.spread = 0.95 * self.spread + 0.05 * abs(loss - self.mean)
        self.mean = 0.95 * self.mean + 0.05 * loss
        return False


LOSSES = st.one_of(st.floats(0.0, 12.0), st.floats(-1e300, 1e300), st.sampled_from([math.nan, math.inf, -math.inf]))


@given(
    losses=st.lists(st.tuples(LOSSES, st.sampled_from([1.0, 1.0, 1.0, math.inf])), max_size=30),
    factor=st.floats(0.01, 3.0),
    warmup=st.integers(0, 10),
)
@settings(deadline=None, max_examples=50)
def test_the_device_judges_as_python_would(losses: list[tuple[float, float]], factor: float, warmup: int) -> None:
    config = SpikeConfig(factor=factor, warmup_steps=warmup)
    watch, truth = SpikeWatch(config), InPython(config)
    for step, (loss, norm) in enumerate(losses):
        numbers = torch.tensor(loss, dtype=torch.float64), torch.tensor(norm)
        assert bool(watch.judge(step, *numbers)) == truth.judge(step, loss, norm)
        expected = {"count": truth.count, "left_out": 0, "mean": truth.mean, "spread": truth.spread}
        assert watch.state_dict() == expected, "to the last bit"
        if step % 7 == 6:  # a run that resumes goes on as it was
            saved, watch = watch.state_dict(), SpikeWatch(config)
            watch.load_state_dict(saved)


def config_for(tokens: Path, out: Path, **spikes: Any) -> TrainConfig:
    return TrainConfig(
        model=ModelConfig(vocab_size=512, dim=16, layers=1, heads=2, max_positions=32),
        data=DataConfig(tokens=str(tokens)),
        batch_tokens=64,
        budget_tokens=64 * 16,
        out=str(out),
        optimizer=OptimizerConfig(kind="muon", lr=0.01),
        validate_steps=1,
        trackers=(),
        plots=False,
        spikes=SpikeConfig(snapshot_steps=4, **spikes),
    )


class Poisoner:
    """Puts something that is no number into the weights after some steps, each time once."""

    def __init__(self, *after: int) -> None:
        self.after, self.calls = after, 0

    def __call__(self, model: Transformer, world: World) -> dict[str, float]:
        self.calls += 1
        if self.calls in self.after:
            with torch.no_grad():
                model.output_weight()[3] = math.nan
        return {}


def test_weights_that_broke_are_gone_back_from(tokens: Path, tmp_path: Path) -> None:
    good = train(config_for(tokens, tmp_path / "good"))
    summary = train(config_for(tokens, tmp_path / "run", action="rollback"), validate=Poisoner(6, 11))
    rows = read_metrics(tmp_path / "run")
    assert summary.finished
    assert math.isfinite(summary.loss)
    assert [row["step"] for row in rows] == list(range(1, 17))
    assert all(row["loss"] is not None for row in rows), "every step that counts was taken with good weights"
    assert skipped(tmp_path / "run")[0]["step"] == 4
    assert summary.skipped_batches == sum(entry["batches"] for entry in skipped(tmp_path / "run")) > 2
    assert good.skipped_batches == 0
    first = [row["loss"] for row in read_metrics(tmp_path / "good")][:4]
    assert [row["loss"] for row in rows][:4] == first, "before the snapshot nothing changed"


def test_skipping_counts_and_stopping_says_why(tokens: Path, tmp_path: Path) -> None:
    summary = train(config_for(tokens, tmp_path / "skip", action="skip"), validate=Poisoner(12))
    assert summary.skipped_batches == 4, "broken weights stay broken: only a roll-back mends them"
    with pytest.raises(
        PiledriverError, match="the updates of 3 steps in a row up to 15 were skipped; the last loss is nan"
    ):
        train(config_for(tokens, tmp_path / "stuck", action="skip", max_skips=3), validate=Poisoner(12))
    with pytest.raises(PiledriverError, match="the loss of step 13 is nan"):
        train(config_for(tokens, tmp_path / "stop", action="stop"), validate=Poisoner(12))
    (metrics,) = (tmp_path / "stop").glob("metrics.jsonl")
    assert len(metrics.read_text().splitlines()) == 12, "what was known when it broke is in the file"


def test_going_back_again_and_again_ends_with_an_error(tokens: Path, tmp_path: Path) -> None:
    config = config_for(tokens, tmp_path / "run", action="rollback", max_rollbacks=2)
    with pytest.raises(PiledriverError, match="rolled back to step 4 2 times"):
        train(config, validate=Poisoner(*range(5, 40)))
    assert len(skipped(tmp_path / "run")) == 2


def test_checkpoints_are_where_a_run_can_go_back_to() -> None:
    with pytest.raises(ConfigError, match="not a multiple"):
        TrainConfig(
            model="gpt2",
            data=DataConfig(tokens="t"),
            batch_tokens=1024,
            budget_tokens=1024,
            checkpoint_steps=30,
            spikes=SpikeConfig(action="rollback", snapshot_steps=20),
        )
