"""JSON lines, Parquet and plain text: rows of others."""

from __future__ import annotations

import datetime
import gzip
import io
from functools import partial
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.corpus.sources import jsonl
from piledriver.corpus.sources.shared.line_pieces import line_pieces, piece_lines
from tests.corpus.sources.extracting import extract_bytes, extract_paths

ROWS = [
    {"text": f"document {i}\nsecond line é", "meta": {"pile_set_name": "X"}, "url": f"http://a/{i}"} for i in range(50)
]
LINES = b"".join(msgspec.json.encode(row) + b"\n" for row in ROWS)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.jsonl", LINES.rstrip(b"\n")),
        ("a.jsonl.gz", gzip.compress(LINES)),
        ("a.jsonl.zst", zstandard.compress(LINES)),
        ("a.json", msgspec.json.encode(ROWS)),
        ("a.json", LINES),
    ],
)
def test_rows_in_every_packing(name: str, content: bytes) -> None:
    documents, refusals = extract_bytes("jsonl", name, content)
    assert [document.text for document in documents] == [row["text"] for row in ROWS]
    assert documents[7].meta["url"] == "http://a/7"
    assert documents[7].meta["original_pile_set_name"] == "X"
    assert refusals == []


@pytest.mark.parametrize("size", [1, 7, 64, 111, 1000])
def test_any_range_gives_the_same_rows(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "line_pieces", partial(line_pieces, piece_bytes=size))
    documents, _ = extract_bytes("jsonl", "a.jsonl", LINES)
    assert [document.text for document in documents] == [row["text"] for row in ROWS]


def test_fields_that_are_called_like_ours_are_kept_under_other_names() -> None:
    row = b'{"content": "a", "text": 5, "source": "s", "id": 7, "origin": "o", "license": "MIT", "meta": {"x": null}}\n'
    documents, _ = extract_bytes("jsonl", "a.jsonl", row)
    assert documents[0].text == "a"
    wanted = {"original_text": 5, "original_source": "s", "original_id": 7, "original_origin": "o", "licence": "MIT"}
    assert documents[0].meta == {"origin": "a.jsonl@0", **wanted}


def test_one_object_over_many_lines() -> None:
    documents, refusals = extract_bytes("jsonl", "a.json", b'{\n  "text": "a",\n  "n": 1\n}\n')
    assert [(document.text, document.meta["n"]) for document in documents] == [("a", 1)]
    assert refusals == []


def test_what_is_no_row_is_refused_alone() -> None:
    content = b'{"text": "a"}\nnot json\n[1]\n{"b": 1}\n\n{"text": ["p", "q"]}\n"bare"\n'
    documents, refusals = extract_bytes("jsonl", "a.jsonl", content)
    assert [document.text for document in documents] == ["a", "p\n\nq", "bare"]
    assert [refusal.reason for refusal in refusals] == ["invalid json", "not an object", "no text field"]
    assert refusals[0].origin == "a.jsonl@14"


def test_a_line_without_end_is_refused_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "piece_lines", partial(piece_lines, max_bytes=1000))
    documents, refusals = extract_bytes("jsonl", "a.jsonl", b'{"text":"' + b"x" * 600_000 + b'"}\n{"text": "b"}\n')
    assert [document.text for document in documents] == ["b"]
    assert [refusal.reason for refusal in refusals] == ["line too long"]


@given(st.binary(max_size=300), st.integers(0, 400))
@settings(max_examples=40)
def test_damage_never_gets_out(noise: bytes, at: int) -> None:
    documents, refusals = extract_bytes("jsonl", "a.jsonl", LINES[:at] + noise + LINES[at:])
    assert len(documents) + len(refusals) >= 49


def test_parquet_rows(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    day = datetime.date(2020, 1, 2)
    table = pa.table({"content": [f"row {i}" for i in range(10)], "day": [day] * 10, "n": list(range(10))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    documents, refusals = extract_paths("parquet", tmp_path)
    assert [document.text for document in documents] == [f"row {i}" for i in range(10)]
    assert documents[4].meta["day"] == "2020-01-02"
    assert documents[4].meta["origin"].endswith("a.parquet#1:1")
    assert refusals == []
    packed = io.BytesIO()
    pq.write_table(table, packed)
    _, refusals = extract_bytes("parquet", "b.parquet", packed.getvalue()[:200])
    assert [refusal.reason for refusal in refusals] == ["invalid parquet"]


def test_text_in_any_encoding() -> None:
    documents, _ = extract_bytes("text", "a.txt", "naïve café\n".encode("utf-16"))
    assert documents[0].text == "naïve café"


def test_text_in_a_column_of_bytes(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"content": pa.array(["naïve".encode(), b"na\xefve words"])}), tmp_path / "a.parquet")
    documents, _ = extract_paths("parquet", tmp_path)
    assert [document.text for document in documents] == ["naïve", "naïve words"]
