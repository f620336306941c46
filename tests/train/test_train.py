"""Laws 2 and 3 for `piledriver train`: killed anywhere and resumed, on any number of processes, it is the same run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from piledriver.core.errors import ConfigError
from piledriver.corpus import ShardFileWriter, make_document
from piledriver.data import TokenizerTraining, tokenize_corpus, train_tokenizer
from piledriver.train.batching import cut_batch

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
out: {out}
"""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    luck = random.Random(0)
    words = ["".join(luck.choices("abcdefgh", k=luck.randint(2, 6))) for _ in range(300)]
    with ShardFileWriter(folder / "00000.jsonl.zst") as shard:
        for i in range(150):
            text = " ".join(luck.choices(words, k=luck.randint(5, 120)))
            shard.write(make_document(text, source="AB"[i % 2], origin=str(i), licence="CC0-1.0"))
    tokenizer = train_tokenizer(folder / "00000.jsonl.zst", TokenizerTraining(vocab_size=400))
    (folder / "tokenizer.json").write_bytes(tokenizer.content)
    tokenize_corpus(folder / "00000.jsonl.zst", folder / "tokenizer.json", folder / "tokens")
    return folder / "tokens"


def start(tokens: Path, out: Path, processes: int = 1) -> subprocess.Popen[str]:
    out.parent.mkdir(parents=True, exist_ok=True)
    config = out.parent / "config.yaml"
    config.write_text(CONFIG.format(tokens=tokens, out=out, budget=256 * STEPS))
    verb = [sys.executable, "-m", "piledriver.cli.main"]
    if processes > 1:
        command = [*verb, "launch", "--nproc", str(processes), "--max-restarts", "0", "--module", "piledriver.cli.main"]
        command += ["train", str(config)]
    else:
        command = [*verb, "train", str(config)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, **pipes, env=environment, start_new_session=True)


def finish(process: subprocess.Popen[str]) -> int:
    said, _ = process.communicate(timeout=240)
    assert process.returncode in (0, 75), said
    return process.returncode


def curve(out: Path) -> dict[int, float]:
    """The loss of each step, as it was last taken."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def lines_of(out: Path) -> int:
    return len((out / "metrics.jsonl").read_text().splitlines()) if (out / "metrics.jsonl").exists() else 0


def weights(out: Path) -> dict[str, Any]:
    return {name: array.tobytes() for name, array in load_file(out / "model" / "model.safetensors").items()}


@pytest.fixture(scope="module")
def undisturbed(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    assert finish(start(tokens, out)) == 0
    assert sorted(curve(out)) == list(range(1, STEPS + 1))
    return out


@pytest.mark.slow
def test_kill_9_anywhere_and_resume_is_the_same_run(tokens: Path, undisturbed: Path, tmp_path: Path) -> None:
    out, luck, kills = tmp_path / "run", random.Random(3), 0
    while True:
        process = start(tokens, out)
        wanted = luck.randint(1, STEPS - 2)
        while process.poll() is None and kills < 4:
            if lines_of(out) >= wanted * (kills + 1) // 2:
                os.killpg(process.pid, signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        process.communicate()
        if process.returncode == 0:
            break
    assert kills >= 2
    assert curve(out) == curve(undisturbed), "the same losses, to the last bit"
    assert weights(out) == weights(undisturbed)


@pytest.mark.slow
def test_sigterm_saves_and_says_to_come_back(tokens: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(tokens, out)
    while lines_of(out) < 5:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    code = finish(process)
    steps = max(curve(out))
    if code == 75:
        assert any(folder.name == f"step-{steps}" for folder in (out / "checkpoints").iterdir())
        assert finish(start(tokens, out)) == 0
    assert curve(out) == curve(undisturbed)
    assert weights(out) == weights(undisturbed)


@pytest.mark.slow
def test_two_processes_take_the_same_steps_and_one_can_go_on(tokens: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = start(tokens, out, processes=2)
    while not (out / "checkpoints" / "step-8" / "header.json").exists() and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    before = curve(out)
    assert finish(start(tokens, out)) == 0
    assert list(curve(out).values()) == pytest.approx(list(curve(undisturbed).values()), rel=1e-4)
    assert list(before.values()) == pytest.approx([curve(undisturbed)[step] for step in before], rel=1e-4)
    record = json.loads((out / "stream.json").read_text())
    assert len(record["segments"]) == 1, "another number of processes reads the same stream"


@pytest.mark.slow
def test_the_trace_names_the_documents_that_were_in_the_batch(tokens: Path, undisturbed: Path) -> None:
    from piledriver.data import open_tokens, trace_step
    from piledriver.data.record import open_segment, read_record, segment_of

    tokenizer = open_tokens(tokens).tokenizer()
    for step in (0, 7, STEPS - 1):
        segment = segment_of(read_record(undisturbed), step)
        windows = open_segment(segment).read_at(np.array(segment.indices(step)))
        traced = trace_step(undisturbed, step)
        assert {part.window for part in traced} == set(range(8))
        for part in traced:
            (place, *_) = open_tokens(tokens).find(part.document)
            document = tokenizer.decode_bytes(open_tokens(tokens).document(place.shard, place.row))
            assert part.bytes is not None
            inside = document[slice(*part.bytes)]
            assert inside in tokenizer.decode_bytes(windows.inputs[part.window])


@pytest.mark.parametrize(
    ("tokens_asked", "processes", "said"),
    [(1000, 1, "use 992"), (32 * 3, 2, "use batch_tokens=128"), (16, 1, "use 32")],
)
def test_a_batch_that_cannot_be_cut_names_the_nearest(tokens_asked: int, processes: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        cut_batch(tokens_asked, 32, processes, None, "cpu")
