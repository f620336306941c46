"""kill -9 at random moments, of the build and of its workers, with every kind of stage: the bytes do not change."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from piledriver.core.errors import UsageError
from piledriver.corpus.pipeline.build import build_corpus
from piledriver.corpus.pipeline.manifest import load_manifest
from piledriver.corpus.pipeline.recipe import load_recipe
from tests.corpus.pipeline.test_build import WORDS, content, raw_files

# Ten deaths and restarts: minutes where the machine is busy.
pytestmark = pytest.mark.slow

RECIPE = """
name: everything
seed: 7
shard_bytes: 60_000
splits: {validation: 0.05, test: 0.05}
sources:
  - {source: text, name: One, paths: [raw/one], epochs: 1.5}
  - {source: text, name: Two, paths: [raw/two]}
stages:
  - {use: length, settings: {min_characters: 100}}
  - {use: pii}
  - {use: exact}
  - {use: near}
  - {use: decontaminate, settings: {files: [evaluation.jsonl], action: cut}}
  - {use: paragraphs, settings: {min_characters: 60}}
  - {use: substring, settings: {min_bytes: 80}}
"""
# Small chunks: some hundred tasks to be killed in.
_BUILD = """
import sys
from piledriver.corpus.pipeline.build import build_corpus
from piledriver.corpus.pipeline.recipe import load_recipe
build_corpus(load_recipe(sys.argv[1]), sys.argv[2], workers=2, chunk_bytes=20_000, keep_work=True)
"""


KILLS = 7


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts with something to do for every stage: copies, edits, a question of an evaluation, paragraphs and spans."""
    folder = tmp_path_factory.mktemp("kills")
    raw_files(folder / "raw")
    luck = random.Random(3)
    question, paragraph, span = (" ".join(luck.choices(WORDS, k=count)) for count in (20, 15, 20))
    (folder / "evaluation.jsonl").write_text(json.dumps({"text": question}) + "\n")
    for number, path in enumerate(sorted((folder / "raw").rglob("*.txt"))):
        text = path.read_text()
        if number % 10 > 2:
            middle = text.index(" ", len(text) // 2)
            inside = {3: f" {question} ", 4: f" {span} ", 5: f"\n\n{paragraph}\n\n"}.get(number % 10, " x@example.com ")
            path.write_text(text[:middle] + inside + text[middle:])
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.fixture(scope="module")
def expected(place: Path) -> dict[str, bytes]:
    """The undisturbed corpus, after a look that every stage had something to do."""
    subprocess.run(command(place, place / "expected"), check=True)
    stages = {stage["stage"]: stage["sources"]["One"] for stage in load_manifest(place / "expected").stages}
    assert stages["filter"]["replaced"]["email"]
    for name in ("exact", "near"):
        assert stages[name]["dropped"]
    for name in ("decontaminate", "paragraphs", "substring"):
        assert stages[name]["removed"]
    return content(place / "expected")


def _files(corpus: Path) -> int:
    """How far a build is."""
    return sum(len(names) for _, _, names in os.walk(corpus))


def command(place: Path, out: Path) -> list[str]:
    return [sys.executable, "-c", _BUILD, str(place / "recipe.yaml"), str(out)]


def test_kill_9_of_the_build_at_random_moments_changes_nothing(
    place: Path, tmp_path: Path, expected: dict[str, bytes]
) -> None:
    luck = random.Random(1)
    out = tmp_path / "out"
    everything = _files(place / "expected")
    # A moment is how much is done, not the time: so the deaths are spread over the work on a machine of any speed, and
    # none is wasted while Python starts.
    killed = 0
    for moment in sorted(luck.uniform(0.01, 0.97) for _ in range(KILLS)):
        with subprocess.Popen(command(place, out)) as process:
            while process.poll() is None and _files(out) < moment * everything:
                time.sleep(0.05)
            time.sleep(luck.uniform(0, 0.1))
            process.kill()
        killed += process.returncode == -signal.SIGKILL
    assert killed > KILLS // 2, "the last ones may come too late"
    subprocess.run(command(place, out), check=True)
    assert content(out) == expected


def test_kill_9_of_its_workers_does_not_stop_a_build(place: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    luck = random.Random(2)
    kills = 0
    with subprocess.Popen(command(place, tmp_path / "out")) as process:
        while process.poll() is None:
            time.sleep(luck.uniform(0.3, 1.0))
            victims = _children(process.pid)
            if victims and kills < 6:
                os.kill(luck.choice(victims), signal.SIGKILL)
                kills += 1
    assert process.returncode == 0
    assert kills >= 1
    assert content(tmp_path / "out") == expected


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def test_two_builds_do_not_write_one_corpus(place: Path, tmp_path: Path) -> None:
    with subprocess.Popen(command(place, tmp_path / "out"), stderr=subprocess.DEVNULL) as first:
        while not (tmp_path / "out" / ".work").exists():
            time.sleep(0.05)
        with pytest.raises(UsageError, match="another build is writing"):
            build_corpus(load_recipe(place / "recipe.yaml"), str(tmp_path / "out"))
        first.kill()
