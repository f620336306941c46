"""Stages that take parts out of documents, through a whole build, at the places they promise."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from piledriver.core.errors import ConfigError, UsageError
from piledriver.corpus import read_shards
from piledriver.corpus.document import Document
from piledriver.corpus.filters.classifier import ClassifierSettings, train_classifier
from piledriver.corpus.pipeline.build import build_corpus
from piledriver.corpus.pipeline.manifest import load_manifest, verify_corpus
from piledriver.corpus.pipeline.recipe import load_recipe

pytestmark = pytest.mark.slow


def words(seed: int, count: int) -> str:
    luck = random.Random(seed)
    return " ".join(f"w{luck.randrange(10**6)}" for _ in range(count))


def built(folder: Path, texts: dict[str, str], stages_yaml: str, out: str = "out", **more: Any) -> list[Document]:
    (folder / "raw").mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / "raw" / f"{name}.txt").write_text(text)
    (folder / "recipe.yaml").write_text(
        f"splits: {{validation: 0, test: 0}}\nsources:\n  - {{source: text, name: One, paths: [raw]}}\n"
        f"stages:\n{stages_yaml}\n"
    )
    build_corpus(load_recipe(folder / "recipe.yaml"), str(folder / out), **more)
    assert verify_corpus(folder / out) == []
    return list(read_shards(folder / out / "train"))


def ledger(folder: Path) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = pq.read_table(folder / "out" / "ledger.parquet").to_pylist()
    return rows


def test_evaluation_text_is_removed_or_cut_out_and_reported(tmp_path: Path) -> None:
    question = words(1, 20)
    (tmp_path / "evaluation.txt").write_text(question)
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": words(2, 30)}) + "\n" + json.dumps({"text": "short"}))
    body = words(3, 400)
    middle = body.index(" ", len(body) // 2)
    texts = {
        "clean": words(4, 100),
        "hit": f"{body[:middle]} {question.upper()}\n{body[middle:]}",
        "twelve": f"{words(5, 100)} {' '.join(question.split()[:12])} {words(6, 10)}",
        "tiny": f"x {words(2, 30)} y",
    }
    files = "files: [evaluation.txt, more.jsonl]"
    kept = built(tmp_path, texts, f"  - {{use: decontaminate, settings: {{{files}}}}}")
    assert {d.meta["origin"] for d in kept} == {"raw/clean.txt", "raw/twelve.txt"}
    account = load_manifest(tmp_path / "out").stages[-1]["sources"]["One"]
    assert account["hits"] == {"evaluation.txt": 1, "more.jsonl#0": 1}
    assert {(row["reason"], row["detail"]) for row in ledger(tmp_path)} == {
        ("evaluation text", "evaluation.txt"),
        ("evaluation text", "more.jsonl#0"),
    }
    kept = built(tmp_path, texts, f"  - {{use: decontaminate, settings: {{{files}, action: cut}}}}")
    pieces = [d for d in kept if d.meta["origin"] == "raw/hit.txt"]
    whole = texts["hit"]
    at = whole.index(question.upper())
    assert {d.text for d in pieces} == {whole[: at - 200], whole[at + len(question) + 200 :]}
    assert {d.meta["cut_at"] for d in pieces} == {0, at + len(question) + 200}
    assert "raw/tiny.txt" not in {d.meta["origin"] for d in kept}, "its pieces are too short"
    cut = next(row for row in ledger(tmp_path) if row["reason"].startswith("cut"))
    assert cut["kept"] in {d.id for d in pieces}
    assert len({d.id for d in kept}) == len(kept)


def test_a_document_that_would_fall_into_too_many_pieces_goes(tmp_path: Path) -> None:
    question = words(1, 15)
    (tmp_path / "evaluation.txt").write_text(question)
    texts = {
        "often": f" {question} ".join(words(i + 2, 100) for i in range(12)),
        "less": f" {question} ".join(words(i + 50, 100) for i in range(10)),
    }
    stage = "  - {use: decontaminate, settings: {files: [evaluation.txt], action: cut}}"
    kept = built(tmp_path, texts, stage)
    assert [d.meta["origin"] for d in kept] == ["raw/less.txt"] * 10
    assert {row["reason"] for row in ledger(tmp_path)} == {"evaluation text", "cut around evaluation text"}
    counts = load_manifest(tmp_path / "out").stages[-1]["sources"]["One"]
    assert counts["dropped"] == {"decontaminate: evaluation text": 1}
    assert counts["removed"] == {"documents cut around evaluation text": 1}


def test_another_evaluation_text_of_the_same_name_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    one, two = words(1, 30), words(2, 30)
    stage = "  - {use: decontaminate, settings: {files: [evaluation.txt]}}"
    (tmp_path / "evaluation.txt").write_text(one)
    assert [d.text for d in built(tmp_path, {"a": one, "b": two}, stage)] == [two]
    (tmp_path / "evaluation.txt").write_text(two)
    assert [d.text for d in built(tmp_path, {"a": one, "b": two}, stage)] == [one]


def test_repeated_paragraphs_stay_once(tmp_path: Path) -> None:
    footer = words(0, 30)
    texts = {f"{i:02d}": f"{words(i + 1, 40)}\n\n{footer}\n\nEnd {i}." for i in range(12)}
    texts["99"] = footer
    kept = {d.meta["origin"]: d.text for d in built(tmp_path, texts, "  - {use: paragraphs}", chunk_bytes=1500)}
    assert kept["raw/00.txt"] == texts["00"]
    assert "raw/99.txt" not in kept
    for i in range(1, 12):
        assert kept[f"raw/{i:02d}.txt"] == f"{words(i + 1, 40)}\n\nEnd {i}."
    account = load_manifest(tmp_path / "out").stages[-1]["sources"]["One"]
    assert account["removed"]["paragraphs"] == 12
    assert account["dropped"] == {"paragraphs: repeated paragraphs": 1}


def test_repeated_spans_stay_once_whatever_stands_around(tmp_path: Path) -> None:
    span = "«" + words(0, 60).replace("w", "ŵ") + "»"
    texts = {f"{i:02d}": f"{words(i + 1, 30 + i)}{chr(97 + i)}{span}{chr(65 + i)}{words(i + 50, 20)}" for i in range(9)}
    stage = "  - {use: substring, settings: {min_bytes: 100}}"
    kept = {d.meta["origin"]: d.text for d in built(tmp_path, texts, stage, chunk_bytes=1500)}
    assert kept["raw/00.txt"] == texts["00"]
    for i in range(1, 9):
        expected = f"{words(i + 1, 30 + i)}{chr(97 + i)}{chr(65 + i)}{words(i + 50, 20)}"
        assert kept[f"raw/{i:02d}.txt"] == expected
    removed = load_manifest(tmp_path / "out").stages[-1]["sources"]["One"]["removed"]
    assert removed == {"spans": 8, "bytes": 8 * len(span.encode())}


def test_a_filter_follows_the_content_of_its_files_and_the_seed(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("apple\n")
    texts = {"a": "an apple here", "b": "a pear here", "c": "write to jo@example.com"}
    stage = "  - {use: profanity, settings: {words: words.txt}}\n  - {use: pii}"
    assert {d.text[:4] for d in built(tmp_path, texts, stage)} == {"a pe", "writ"}
    assert load_manifest(tmp_path / "out").stages[-1]["sources"]["One"]["replaced"] == {"email": 1}
    assert load_manifest(tmp_path / "out").recipe["stages"][0]["settings"]["words"] == "words.txt"
    (tmp_path / "words.txt").write_text("pear\n")
    assert {d.text[:4] for d in built(tmp_path, texts, stage)} == {"an a", "writ"}
    train_classifier(["good words"] * 5, ["bad words"] * 5, ClassifierSettings(bits=8)).save(tmp_path / "model")
    many = {f"t{i}": f"neither {words(i, 5)}" for i in range(40)}
    stage = "  - {use: quality, settings: {model: model, alpha: 1}}"
    some = {d.id for d in built(tmp_path, many, stage)}
    assert 0 < len(some) < 43
    assert {d.id for d in built(tmp_path, many, stage, out="again")} == some


@pytest.mark.parametrize(
    ("stage", "error", "said"),
    [
        ("{use: decontaminate}", ConfigError, "has no files"),
        ("{use: decontaminate, settings: {files: [nowhere.txt]}}", UsageError, "does not exist"),
        ("{use: substring, settings: {min_bytes: 3}}", ConfigError, "at least 16"),
        ("{use: paragraphs, settings: {unit: word}}", ConfigError, "line"),
        ("{use: quality, settings: {model: nowhere}}", UsageError, "does not exist"),
    ],
)
def test_a_wrong_stage_is_refused_before_any_work(
    stage: str, error: type[Exception], said: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=said):
        built(tmp_path, {"a": "text"}, f"  - {stage}")
    assert not (tmp_path / "out" / ".work").exists()
