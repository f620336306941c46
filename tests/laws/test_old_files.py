"""Files of version 0.1 still open: checkpoints, a run that resumes, token shards, a corpus, a published model.

Through the verbs of the command line where there is one, since these keep their names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from piledriver import functional
from piledriver.checkpoint import load, load_model, verify
from piledriver.cli.main import main
from piledriver.corpus import read_shards
from tests.checkpoint import processes
from tests.laws.old_files import (
    FIXTURES,
    PROBE,
    STEPS,
    STEPS_TO_THE_CHECKPOINT,
    Model,
    Tally,
    contents,
    make_run,
    state,
    steps,
)


def say(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a verb prints; it must end well."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def expected(name: str) -> Any:
    return json.loads((FIXTURES / name).read_text())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_resumes_on_one_process(ranks: int) -> None:
    folder = FIXTURES / f"checkpoint_of_{ranks}"
    verify(folder)
    run, own = make_run(seed=99, tied=ranks == 1), Tally()
    report = load(folder, contents(run, own), strict=ranks == 1)
    assert (report.step, report.extra) == (3, {"epoch": 1})
    # What belonged to each of two ranks has no place on one; nothing else is left out.
    assert [name for name in report.missing if "rank" not in name] == []
    wanted = expected(f"checkpoint_of_{ranks}.json")
    assert run[0].hidden.weight.tolist() == wanted["hidden"]
    tally = run[3].state
    assert torch.equal(tally.pop("average"), torch.arange(3.0))
    assert tally == {"seen": 3, "shape": (1, 2), 7: {"x"}, "name": b"\x00tally"}
    assert steps(run, 3, 6) == pytest.approx(wanted["losses"], rel=1e-5)


def resume_on_two(rank: int, folder: Path) -> tuple[dict[str, Any], list[float]]:
    run, own = make_run(seed=99, sharded=True), Tally()
    load(folder, contents(run, own))
    return own.state, steps(run, 3, 6)


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_resumes_on_two() -> None:
    found = processes.run(2, resume_on_two, FIXTURES / "checkpoint_of_2")
    assert [own for own, _ in found] == [{"rank": 0}, {"rank": 1}]
    for _, losses in found:
        assert losses == pytest.approx(expected("checkpoint_of_2.json")["losses"], rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_is_inspected_merged_and_converted(
    ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = FIXTURES / f"checkpoint_of_{ranks}"
    facts = json.loads(say(capsys, "checkpoint", "inspect", folder, "--verify", "--json"))
    assert facts["step"] == 3
    say(capsys, "checkpoint", "merge", folder, "-o", tmp_path / "merged")
    say(capsys, "checkpoint", "convert", folder, "-o", tmp_path / "converted", "--to", "safetensors")
    model = Model(99)
    if ranks == 1:
        model.out.weight = model.embedding.weight
    for made in ("merged", "converted"):
        model.hidden.weight.data.zero_()
        load_model(model, tmp_path / made)
        assert model.hidden.weight.tolist() == expected(f"checkpoint_of_{ranks}.json")["hidden"]


@pytest.mark.slow
def test_a_run_resumes_and_ends_as_it_would_have(tmp_path: Path) -> None:
    for name in ("run", "tokens"):
        shutil.copytree(FIXTURES / name, tmp_path / name)
    command = [sys.executable, "-m", "piledriver.cli.main", "train", FIXTURES / "train.yaml", "out=run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1)), "it began again"
    for line in lines[STEPS_TO_THE_CHECKPOINT:]:
        assert line["loss"] == pytest.approx(expected("losses.json")[str(line["step"])], rel=1e-5)
    made, old = (load_file(folder / "model.safetensors") for folder in (tmp_path / "run/model", FIXTURES / "model"))
    assert made.keys() == old.keys()
    for name, tensor in made.items():
        torch.testing.assert_close(tensor, old[name], rtol=1e-4, atol=1e-5)


def test_a_run_is_traced(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(say(capsys, "trace", FIXTURES / "run", "--step", "2", "--json"))
    known = {document.id for document in read_shards(FIXTURES / "corpus/train")}
    assert rows
    assert {row["document"] for row in rows} <= known


def test_token_shards_equal_what_is_made_of_their_corpus_today(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (FIXTURES / "corpus/train", "--tokenizer", FIXTURES / "tokenizer.json", "-o", tmp_path / "tokens")
    say(capsys, "tokenize", *arguments, "--workers", "1")
    for old in (FIXTURES / "tokens").glob("*.npy"):
        assert (tmp_path / "tokens" / old.name).read_bytes() == old.read_bytes(), old.name


def test_a_corpus_is_whole_and_names_what_it_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    say(capsys, "corpus", "verify", FIXTURES / "corpus")
    counted = json.loads(say(capsys, "corpus", "stats", FIXTURES / "corpus", "--json"))
    assert {name: source["documents"] for name, source in counted.items()} == {"Garden": 7, "Harbour": 8}
    shown = say(capsys, "corpus", "show", FIXTURES / "corpus", "--dropped", "--json", "--limit", "100")
    rows = [json.loads(line) for line in shown.splitlines()]
    dropped = sorted((row["source"], row["stage"], row["reason"]) for row in rows)
    assert dropped == [
        ("Garden", "exact", "exact duplicate"),
        ("Garden", "near", "near duplicate"),
        ("Harbour", "length", "too short"),
        ("Harbour", "near", "near duplicate"),
        ("Harbour", "near", "near duplicate"),
    ]
    known = {document.id for document in read_shards(FIXTURES / "corpus")}
    assert {row["kept"] for row in rows} - {""} <= known


@pytest.mark.slow
def test_a_recipe_builds_the_same_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    say(capsys, "corpus", "build", FIXTURES / "recipe.yaml", "-o", tmp_path / "corpus", "--workers", "1")
    for split in ("train", "validation", "test"):
        made, old = (list(read_shards(folder / split)) for folder in (tmp_path / "corpus", FIXTURES / "corpus"))
        assert made == old


def test_a_published_model_scores(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--model", FIXTURES / "model", "--corpus", FIXTURES / "corpus/validation", "--json")
    scores = json.loads(say(capsys, "evaluate", "bpb", *arguments))["bits_per_byte"]
    assert scores["all"]["bits_per_byte"] == pytest.approx(expected("scores.json")["bits_per_byte"], rel=1e-5)


def test_a_classifier_scores() -> None:
    from piledriver.corpus.filters.classifier import load_classifier

    model = load_classifier(str(FIXTURES / "quality.model"))
    assert model.score(PROBE) == pytest.approx(expected("scores.json")["quality"], rel=1e-5)


def test_a_packed_state_is_what_it_was() -> None:
    found, wanted = functional.from_bytes(state(), (FIXTURES / "state.msgpack").read_bytes()), state()
    assert found.pop("note") == wanted.pop("note")
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
