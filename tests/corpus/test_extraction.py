"""Extraction: the same bytes for any number of workers; everything found is taken or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zstandard

from piledriver.core.errors import PiledriverError, UsageError
from piledriver.corpus import extraction as module
from piledriver.corpus import read_shards
from piledriver.corpus.extraction import extract

pytestmark = pytest.mark.slow


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    folder.mkdir()
    for i in range(300):
        (folder / f"{i:03d}.txt").write_text(f"document {i}\r\n" * (i % 7) + "ﬁn cafe\u0301\x08")
    (folder / "empty.txt").write_text(" \n ")
    (folder / "broken.tar.gz").write_bytes(b"\x1f\x8bgarbage")
    return folder


def test_the_bytes_are_the_same_for_any_number_of_workers(raw: Path, tmp_path: Path) -> None:
    outputs = set()
    for workers in (1, 2, 3):
        out, rejects = tmp_path / f"{workers}.jsonl.zst", tmp_path / f"r{workers}.jsonl.zst"
        summary = extract("text", [str(raw)], out, rejects=rejects, workers=workers)
        outputs.add((out.read_bytes(), rejects.read_bytes()))
        assert summary.documents == 300
        assert summary.refused == {"empty text": 1, "damaged archive": 1}
    assert len(outputs) == 1
    documents = list(read_shards(tmp_path / "1.jsonl.zst"))
    assert documents[3].text == "document 3\ndocument 3\ndocument 3\nﬁn café"
    assert documents[3].meta == {"origin": "raw/003.txt", "licence": "yours"}
    assert len({document.id for document in documents}) == 300
    rows = [json.loads(line) for line in zstandard.open(tmp_path / "r1.jsonl.zst", "rt")]
    assert {(row["reason"], row["origin"]) for row in rows} == {
        ("empty text", "raw/empty.txt"),
        ("damaged archive", "raw/broken.tar.gz"),
    }


def test_what_is_not_of_the_source_is_said(raw: Path, tmp_path: Path) -> None:
    for name in ("a.pdf", "sub/b.PDF", "README"):
        (raw / name).parent.mkdir(exist_ok=True)
        (raw / name).write_bytes(b"x")
    summary = extract("text", [str(raw)], tmp_path / "o.jsonl.zst")
    assert summary.passed_over == {".pdf": 2, "README": 1}
    assert summary.skipped_files == ["raw/README", "raw/a.pdf", "raw/sub/b.PDF"]
    with pytest.raises(PiledriverError, match=r"skipped by name 1 \.pdf: sub/b\.PDF\)\. Fix: .*by its path"):
        extract("text", [str(raw / "sub")], tmp_path / "p.jsonl.zst")


def test_a_piece_that_kills_its_worker_is_refused_and_the_rest_goes_on(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "extract_batch", deadly_batch)
    summary = extract("text", [str(raw)], tmp_path / "o.jsonl.zst", workers=2)
    assert summary.documents == 299
    assert summary.refused["parser crashed"] == 1


def deadly_batch(task: tuple[str, list[object]]) -> object:
    """A worker whose parser crashes on one file, as native code does."""
    import os
    import signal

    if any(getattr(piece, "origin", "").endswith("042.txt") for piece in task[1]):
        os.kill(os.getpid(), signal.SIGSEGV)
    return module.extract_batch(task)  # type: ignore[arg-type]


def test_nothing_found_is_an_error_and_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.bin").write_bytes(b"x")
    with pytest.raises(PiledriverError, match="no text document in"):
        extract("text", [str(tmp_path / "raw")], tmp_path / "o.jsonl.zst")
    with pytest.raises(UsageError, match="must end in"):
        extract("text", [str(tmp_path / "raw")], tmp_path / "o.json")
    assert not list(tmp_path.glob("o*"))
