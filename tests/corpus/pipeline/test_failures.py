"""What goes wrong from outside: no space, damaged input, input and recipe that change. Loud, never a wrong result."""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from piledriver.core.errors import PiledriverError, StorageError, UsageError
from piledriver.corpus import read_shards
from piledriver.corpus.document import Document
from piledriver.corpus.pipeline import build as build_module
from piledriver.corpus.pipeline.build import build_corpus
from piledriver.corpus.pipeline.deduplicate import deduplicate
from piledriver.corpus.pipeline.ledger import read_ledger
from piledriver.corpus.pipeline.manifest import load_manifest, verify_corpus
from piledriver.corpus.pipeline.recipe import load_recipe
from piledriver.corpus.shards.writer import ShardFileWriter

pytestmark = pytest.mark.slow


def text(seed: int) -> str:
    luck = random.Random(seed)
    return " ".join(f"w{luck.randrange(10**6)}" for _ in range(300))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "raw").mkdir()
    for i in range(20):
        (tmp_path / "raw" / f"{i:02d}.txt").write_text(text(i))
    recipe(tmp_path, "{use: exact}, {use: near}")
    return tmp_path


def recipe(folder: Path, stages_yaml: str) -> None:
    (folder / "recipe.yaml").write_text(
        "splits: {validation: 0.1, test: 0}\nsources: [{source: text, name: One, paths: [raw]}]\n"
        f"stages: [{stages_yaml}]\n"
    )


def build(folder: Path, out: str = "out") -> Path:
    build_corpus(load_recipe(folder / "recipe.yaml"), str(folder / out), keep_work=True)
    assert verify_corpus(folder / out) == []
    return folder / out


def bytes_of(corpus: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(corpus)): path.read_bytes()
        for path in corpus.rglob("*")
        if path.is_file() and ".work" not in path.parts and path.name != ".lock"
    }


def tasks(corpus: Path, function: str) -> set[str]:
    """The finished tasks that read documents and wrote a chunk, or all."""
    return {path.parent.name for path in (corpus / ".work").glob(f"*/*/{function}")}


@pytest.mark.parametrize("most_bytes", [3_000, 12_000])
def test_no_space_left_is_said_and_the_next_run_goes_on(place: Path, most_bytes: int) -> None:
    """A limit on the size of files stands for a full disk: the same writes fail, at the same places."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    command = [sys.executable, "-m", "piledriver.cli.main", "corpus", "build", str(place / "recipe.yaml")]
    # Python keeps what it compiled in files too, and does not notice that only the beginning was written.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [*command, "-o", str(place / "out"), "--workers", "1"],
        preexec_fn=limit,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    said = run.stderr.strip().splitlines()[-1]
    assert "File too large" in said
    assert "Traceback" not in run.stderr
    assert not (place / "out" / "manifest.json").exists()
    assert not list((place / "out").rglob("*.partial"))
    assert bytes_of(build(place)) == bytes_of(build(place, "undisturbed"))


def test_a_damaged_file_costs_itself_and_is_in_the_ledger(place: Path) -> None:
    compressed = gzip.compress(text(99).encode())
    (place / "raw" / "cut.txt.gz").write_bytes(compressed[: len(compressed) // 2])
    out = build(place)
    (row,) = read_ledger(out)
    assert row["stage"] == "extract"
    assert row["origin"] == "raw/cut.txt.gz"
    assert load_manifest(out).stages[0]["sources"]["One"]["documents"] == 20


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(place: Path) -> None:
    (place / "raw" / "05.txt").chmod(0)
    with pytest.raises(PiledriverError, match=r"05\.txt"):
        build(place)


def test_a_file_that_goes_while_it_is_read_stops_the_build(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build_module.checksum_inputs

    def then_change(*arguments: object) -> object:
        found = real(*arguments)  # type: ignore[arg-type]
        (place / "raw" / "03.txt").write_text(text(1000))
        return found

    monkeypatch.setattr(build_module, "checksum_inputs", then_change)
    with pytest.raises(PiledriverError, match=r"03\.txt changed while it was read"):
        build(place)
    assert not (place / "out" / "manifest.json").exists()
    monkeypatch.undo()
    assert text(1000) in {document.text for document in read_shards(build(place))}


def test_an_input_that_changed_between_two_runs_is_read_again(place: Path) -> None:
    build(place)
    # Same name, same size: the time says that it must be looked at, the checksum that it is another.
    (place / "raw" / "07.txt").write_text(text(7)[::-1])
    again = build(place)
    texts = {document.text for document in read_shards(again)}
    assert text(7)[::-1] in texts
    assert text(7) not in texts
    assert bytes_of(again) == bytes_of(build(place, "fresh"))


def test_a_changed_recipe_runs_what_depends_on_it_and_gives_what_a_fresh_build_gives(place: Path) -> None:
    out = build(place)
    before, chunks = (tasks(out, name) for name in ("result.json", "documents.zst"))
    recipe(place, "{use: exact}, {use: near, settings: {threshold: 0.9}}")
    build(place)
    made = tasks(out, "result.json") - before
    assert len(chunks) == 6
    assert len(tasks(out, "documents.zst") - chunks) == 3, "what was extracted, filtered and without copies was there"
    assert bytes_of(out) == bytes_of(build(place, "fresh"))
    recipe(place, "{use: exact}, {use: near}")
    build(place)
    assert tasks(out, "result.json") - before == made, "what was there before is still there"


def test_shards_that_change_or_move_between_two_runs(tmp_path: Path) -> None:
    def write(path: Path, texts: list[str]) -> None:
        with ShardFileWriter(path) as shard:
            for number, each in enumerate(texts):
                shard.write(Document(each, f"{number:032x}", "S"))

    write(tmp_path / "in.jsonl.zst", [text(i % 15) for i in range(20)])
    deduplicate([str(tmp_path / "in.jsonl.zst")], str(tmp_path / "out"), "near", {}, chunk_documents=7, keep_work=True)
    assert [d.text for d in read_shards(tmp_path / "out" / "train")] == [text(i) for i in range(15)]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "in.jsonl.zst").rename(tmp_path / "elsewhere" / "in.jsonl.zst")
    before = tasks(tmp_path / "out", "result.json")
    deduplicate(
        [str(tmp_path / "elsewhere" / "in.jsonl.zst")],
        str(tmp_path / "out"),
        "near",
        {},
        chunk_documents=7,
        keep_work=True,
    )
    assert tasks(tmp_path / "out", "result.json") == before, "the same shard at another place"
    write(tmp_path / "elsewhere" / "in.jsonl.zst", [text(i) for i in range(100, 104)])
    deduplicate(
        [str(tmp_path / "elsewhere" / "in.jsonl.zst")],
        str(tmp_path / "out"),
        "near",
        {},
        chunk_documents=7,
        keep_work=True,
    )
    assert [d.text for d in read_shards(tmp_path / "out" / "train")] == [text(i) for i in range(100, 104)]
    assert verify_corpus(tmp_path / "out") == []


def test_shards_that_others_wrote_give_the_same_as_ours(tmp_path: Path) -> None:
    """One frame without a seek table, ids at the top or none, text as paragraphs, more than one chunk."""
    lines = [{"text": [text(i % 12), "end"], "id": i} for i in range(20)]
    (tmp_path / "theirs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    deduplicate([str(tmp_path / "theirs.jsonl")], str(tmp_path / "out"), "near", {})
    kept = list(read_shards(tmp_path / "out" / "train"))
    assert [(d.id, d.text) for d in kept] == [(str(i), f"{text(i)}\n\nend") for i in range(12)]
    assert [(row["id"], row["kept"]) for row in read_ledger(tmp_path / "out")] == [
        (str(i + 12), str(i)) for i in range(8)
    ]
    assert {row["detail"] for row in read_ledger(tmp_path / "out")} == {"similarity about 1.00"}


@pytest.mark.parametrize("method", ["exact", "near", "paragraphs", "substring"])
def test_fields_of_shards_that_others_wrote_are_kept(method: str, tmp_path: Path) -> None:
    """As in C4, FineWeb and OSCAR."""
    rows = [
        {
            "text": text(i % 6),
            "url": f"https://a.org/{i}",
            "timestamp": "2019-04-25T12:57Z",
            "score": i / 9,
            "tags": [i],
        }
        for i in range(8)
    ]
    (tmp_path / "theirs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    deduplicate([str(tmp_path / "theirs.jsonl")], str(tmp_path / "out"), method, {})
    kept = [document.meta for document in read_shards(tmp_path / "out" / "train")][:6]
    assert kept == [{name: value for name, value in row.items() if name != "text"} for row in rows[:6]]


def test_the_work_folder_goes_at_the_end_and_a_finished_corpus_is_recognised(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe_ = load_recipe(place / "recipe.yaml")
    made = build_corpus(recipe_, str(place / "out"))
    assert not (place / "out" / ".work").exists()
    with monkeypatch.context() as patched:
        patched.setattr(build_module, "mix", None)
        assert build_corpus(recipe_, str(place / "out")) == made
    (place / "out" / made.outputs[0]["path"]).unlink()
    assert build_corpus(recipe_, str(place / "out")) == made
    assert verify_corpus(place / "out") == []
    (place / "raw" / "07.txt").write_text(text(7)[::-1])
    assert build_corpus(recipe_, str(place / "out")) != made


def test_a_finished_corpus_is_built_again_where_a_file_of_a_stage_changed(place: Path) -> None:
    (place / "blocked").write_text("a.org\n")
    recipe(place, "{use: urls, settings: {domains: blocked}}")
    first = build_corpus(load_recipe(place / "recipe.yaml"), str(place / "out"))
    (place / "blocked").write_text("b.org\n")
    assert build_corpus(load_recipe(place / "recipe.yaml"), str(place / "out")).key != first.key


@pytest.mark.parametrize("wrong", ["raw: nothing to read", "raw: missing"])
def test_an_early_error_leaves_nothing(wrong: str, place: Path) -> None:
    shutil.rmtree(place / "raw")
    if wrong != "raw: missing":
        (place / "raw").mkdir()
    with pytest.raises(PiledriverError):
        build_corpus(load_recipe(place / "recipe.yaml"), str(place / "out"))
    assert not (place / "out").exists()


def test_a_corpus_that_is_removed_during_the_build_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = build_module.mix

    def remove_and_mix(*arguments: Any) -> Any:
        shutil.rmtree(place / "out")
        return real(*arguments)

    monkeypatch.setattr(build_module, "mix", remove_and_mix)
    with pytest.raises(PiledriverError, match=r"out was removed during the build"):
        build_corpus(load_recipe(place / "recipe.yaml"), str(place / "out"))


def test_no_documents_at_all_is_an_error(tmp_path: Path) -> None:
    with ShardFileWriter(tmp_path / "empty.jsonl.zst"):
        pass
    with pytest.raises(PiledriverError, match="no documents"):
        deduplicate([str(tmp_path / "empty.jsonl.zst")], str(tmp_path / "out"), "near", {})
    with pytest.raises(StorageError):
        deduplicate([str(tmp_path / "out")], str(tmp_path / "more"), "near", {})


def test_a_corpus_is_not_overwritten_by_a_deduplication(place: Path) -> None:
    corpus = build(place)
    before = bytes_of(corpus)
    with ShardFileWriter(place / "in.jsonl.zst") as writer:
        writer.write(Document(text(1), "0" * 32, "S"))
    with pytest.raises(UsageError, match="built from a recipe"):
        deduplicate([str(place / "in.jsonl.zst")], str(corpus), "near", {})
    assert bytes_of(corpus) == before
