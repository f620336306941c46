"""Shards: what is written is read, from anywhere, by any number of readers; damage is seen; others' files are read."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from piledriver.core.errors import CorruptFileError, StorageError, UsageError
from piledriver.corpus import Document, Part, ShardFileWriter, ShardWriter, count_documents, read_shards, read_texts
from piledriver.corpus.document import make_document
from piledriver.corpus.shards import reader as shard_reader
from piledriver.corpus.shards import writer as shard_writer
from piledriver.corpus.shards.repair import repair_shards

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
origins = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)


def described(text: str, origin: str, licence: str) -> Document:
    return make_document(text, source="S", origin=origin, licence=licence, number=1, nested={"a": [1]})


documents = st.builds(described, texts, origins, st.sampled_from(["MIT", "CC0-1.0"]))


def write(path: Path, items: list[Document], threads: int = 1) -> None:
    with ShardFileWriter(path, threads=threads) as shard:
        for item in items:
            shard.write(item)


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_writer, "FRAME_BYTES", 300)


@given(items=st.lists(documents, max_size=30), start=st.integers(0, 40), parts=st.integers(1, 5))
def test_what_is_written_is_read_from_anywhere_and_in_parts(
    items: list[Document], start: int, parts: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("shard") / "00000.jsonl.zst"
    original, shard_writer.FRAME_BYTES = shard_writer.FRAME_BYTES, 500
    try:
        write(path, items)
    finally:
        shard_writer.FRAME_BYTES = original
    assert list(read_shards(path)) == items
    assert list(read_texts(path)) == [item.text for item in items]
    assert list(read_shards(path, start=start)) == items[start:]
    assert [d for i in range(parts) for d in read_shards(path, part=Part(i, parts))] == items
    assert count_documents(path) == len(items)


@pytest.mark.usefixtures("small_frames")
def test_the_bytes_do_not_depend_on_the_threads(tmp_path: Path) -> None:
    items = [make_document(f"text {i} " * 20, source="S", origin=str(i)) for i in range(200)]
    for threads in (1, 3):
        write(tmp_path / f"{threads}.jsonl.zst", items, threads)
    assert (tmp_path / "1.jsonl.zst").read_bytes() == (tmp_path / "3.jsonl.zst").read_bytes()


@pytest.mark.usefixtures("small_frames")
def test_where_a_folder_is_cut_does_not_depend_on_the_threads(tmp_path: Path) -> None:
    for threads in (1, 3):
        with ShardWriter(tmp_path / str(threads), shard_bytes=5_000, threads=threads) as writer:
            for i in range(400):
                writer.write(make_document(f"text {i} " * 20, source="S", origin=str(i)))
    one, three = ({path.name: path.read_bytes() for path in (tmp_path / n).iterdir()} for n in ("1", "3"))
    assert len(one) > 5
    assert one == three


def test_any_zstd_and_json_reader_can_read_a_shard(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl.zst", [make_document("hé\nllo", source="Pile-CC", origin="o", licence="CC0-1.0")])
    with zstandard.open(tmp_path / "a.jsonl.zst", "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    assert rows[0]["text"] == "hé\nllo"
    assert rows[0]["meta"]["pile_set_name"] == "Pile-CC"
    assert rows[0]["meta"]["licence"] == "CC0-1.0"
    assert set(rows[0]["meta"]) == {"pile_set_name", "id", "origin", "licence"}


def test_a_folder_of_shards_is_one_sequence(tmp_path: Path) -> None:
    items = [make_document(f"text {i} " * 50, source="S", origin=str(i)) for i in range(100)]
    with ShardWriter(tmp_path, shard_bytes=10_000) as writer:
        for item in items:
            writer.write(item)
    names = sorted(os.listdir(tmp_path))
    assert names[:2] == ["00000.jsonl.zst", "00001.jsonl.zst"]
    assert [os.path.basename(summary.path) for summary in writer.summaries] == names
    assert sum(summary.documents for summary in writer.summaries) == 100
    assert list(read_shards(tmp_path)) == items
    assert list(read_shards(tmp_path, start=57)) == items[57:]


ROWS: list[dict[str, Any]] = [
    {"text": "one", "meta": {"pile_set_name": "A", "id": "x"}},
    {"text": ["two", "three"]},
    {"text": "four", "meta": None, "id": 7},
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "frames.jsonl.zst"])
def test_files_that_others_wrote_are_read(name: str, tmp_path: Path) -> None:
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    content = b"".join(lines)
    compress = zstandard.ZstdCompressor().compress
    encoded = {
        "a.jsonl": content.rstrip(b"\n"),
        "a.jsonl.gz": gzip.compress(content[:20]) + gzip.compress(content[20:]),
        "a.jsonl.zst": compress(content),
        "frames.jsonl.zst": b"".join(map(compress, lines)),
    }
    (tmp_path / name).write_bytes(encoded[name])
    found = list(read_shards(tmp_path / name))
    assert [item.text for item in found] == ["one", "two\n\nthree", "four"]
    assert [found[0].source, found[0].id, found[2].id] == ["A", "x", "7"]
    assert found[1].id, "a document without an id gets a stable one"
    assert found == list(read_shards(tmp_path / name))
    assert list(read_texts(tmp_path / name)) == ["one", "two\n\nthree", "four"]
    assert [item.text for item in read_shards(tmp_path / name, start=2)] == ["four"]
    with pytest.raises(UsageError, match="no seek table"):
        list(read_shards(tmp_path / name, part=Part(0, 2)))


def test_a_bad_line_is_named_or_handed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"txet": 1}\n\xff\xfe\n{"text": "two"}\n')
    with pytest.raises(CorruptFileError, match=r"a\.jsonl: document 1"):
        list(read_shards(path))
    bad: list[tuple[int, str]] = []
    found = list(read_shards(path, on_bad=lambda _, number, why: bad.append((number, why))))
    assert [item.text for item in found] == ["one", "two"]
    assert [number for number, _ in bad] == [1, 2]


def test_an_endless_line_is_refused_without_holding_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_reader, "MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(shard_reader, "_BLOCK_BYTES", 1 << 16)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n{"text": "' + b"x" * (5 << 20) + b'"}\n{"text": "two"}\n')
    bad: list[int] = []
    assert [d.text for d in read_shards(path, on_bad=lambda _, number, __: bad.append(number))] == ["one", "two"]
    assert bad == [1]


def test_a_cut_file_of_others_is_seen_too(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"{i} {os.urandom(20).hex()}"}) + "\n" for i in range(5000)).encode()
    for name, whole in (
        ("a.jsonl.zst", zstandard.ZstdCompressor().compress(lines)),
        ("a.jsonl.gz", gzip.compress(lines)),
    ):
        (tmp_path / name).write_bytes(whole[: len(whole) - 3])
        with pytest.raises(CorruptFileError, match=name):
            list(read_shards(tmp_path / name))


@pytest.mark.usefixtures("small_frames")
def test_damage_is_seen_never_read_past(tmp_path: Path) -> None:
    items = [make_document(f"text {i} " * 20, source="S", origin=str(i)) for i in range(50)]
    path = tmp_path / "a.jsonl.zst"
    write(path, items)
    whole = path.read_bytes()
    for cut in [*range(20, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:cut])
        with pytest.raises(CorruptFileError, match=r"a\.jsonl\.zst"):
            list(read_shards(path))
    for at in range(20, len(whole) - 700, 997):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with pytest.raises(CorruptFileError):
            list(read_shards(path))


_WRITER = """
import sys
from piledriver.corpus import Document, ShardFileWriter
with ShardFileWriter(sys.argv[1]) as shard:
    for i in range(10**9):
        shard.write(Document(f"document {i} " * 100))
        if i == 5000: print("writing", flush=True)
"""


@pytest.mark.slow
def test_kill_9_while_writing_leaves_no_shard(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    with subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    assert not path.exists()
    with pytest.raises(StorageError, match="holds no shards"):
        list(read_shards(tmp_path))


def test_lone_surrogates_cannot_break_a_shard(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl.zst", [Document("bad \ud800 text", id="1", meta={"k\udfff": ["\ud800"]})])
    (found,) = read_shards(tmp_path / "a.jsonl.zst")
    assert found.text == "bad ? text"


def test_lone_surrogates_of_others_are_question_marks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a \ud83d\ude00 \ud800", "title": "\udfff"}) + "\n")
    (found,) = read_shards(tmp_path)
    assert (found.text, found.meta) == ("a \U0001f600 ?", {"title": "?"})
    assert list(read_texts(tmp_path)) == ["a \U0001f600 ?"]


def test_fields_of_others_are_kept(tmp_path: Path) -> None:
    rows = [
        {"text": "one", "url": "https://a.org", "timestamp": "2019-04-25T12:57:54Z", "id": 3},
        {"text": "two", "language_score": 0.9, "id": "x", "meta": {"id": "inner", "url": "https://b.org"}},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one, two = read_shards(tmp_path)
    assert (one.id, one.meta) == ("3", {"url": "https://a.org", "timestamp": "2019-04-25T12:57:54Z"})
    assert (two.id, two.meta) == ("inner", {"language_score": 0.9, "url": "https://b.org"})


@pytest.mark.usefixtures("small_frames")
def test_repair_keeps_every_intact_document_with_its_meta(tmp_path: Path) -> None:
    items = [make_document(f"text {i} " * 20, source="S", origin=str(i), licence="MIT") for i in range(50)]
    write(tmp_path / "in" / "whole.jsonl.zst", items)
    whole = (tmp_path / "in" / "whole.jsonl.zst").read_bytes()
    (tmp_path / "in" / "frame.jsonl.zst").write_bytes(whole[:100] + bytes([whole[100] ^ 0xFF]) + whole[101:])
    (tmp_path / "in" / "cut.jsonl.zst").write_bytes(whole[: len(whole) // 2])
    lines = zstandard.ZstdDecompressor().stream_reader(whole, read_across_frames=True).read().splitlines(keepends=True)
    (tmp_path / "in" / "line.jsonl").write_bytes(b"".join([*lines[:7], b'{"text": 1}\n', *lines[7:]]))
    summary = repair_shards(tmp_path / "in", tmp_path / "out", rejects=tmp_path / "bad.jsonl.zst")
    found = {
        name: list(read_shards(tmp_path / "out" / f"{name}.jsonl.zst")) for name in ("whole", "frame", "cut", "line")
    }
    assert found["whole"] == found["line"] == items
    assert 0 < len(items) - len(found["frame"]) < 10
    assert found["frame"] == [item for item in items if item in found["frame"]]
    assert 10 < len(found["cut"]) < 50
    assert found["cut"] == items[: len(found["cut"])]
    assert (summary.files, summary.bad, summary.documents) == (4, 4, sum(map(len, found.values())))
    with zstandard.open(tmp_path / "bad.jsonl.zst", "rt", encoding="utf-8") as rejected:
        reasons = [json.loads(line) for line in rejected]
    assert len(reasons) == summary.bad
    assert any(row["origin"].endswith("line.jsonl#7") for row in reasons)
    with pytest.raises(UsageError, match="both input and output"):
        repair_shards(tmp_path / "in", tmp_path / "in")


def test_repair_of_one_long_frame_keeps_what_is_before_the_damage(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": os.urandom(500).hex(), "id": i}) + "\n" for i in range(2000)).encode()
    whole = bytearray(zstandard.ZstdCompressor().compress(lines))
    whole[len(whole) // 2 : -1000] = b"\xff" * (len(whole) - len(whole) // 2 - 1000)
    (tmp_path / "a.jsonl.zst").write_bytes(whole)
    assert 500 < repair_shards(tmp_path / "a.jsonl.zst", tmp_path / "out.jsonl.zst").documents < 1000
    (tmp_path / "a.jsonl.zst").write_bytes(whole[:100])
    with pytest.raises(CorruptFileError, match="no document can be read"):
        repair_shards(tmp_path / "a.jsonl.zst", tmp_path / "none.jsonl.zst")
    assert not (tmp_path / "none.jsonl.zst").exists()


def test_hidden_folders_are_not_read(tmp_path: Path) -> None:
    top = tmp_path / ".cache" / "corpus"
    for name in ("a.jsonl", "sub/b.jsonl", ".work/c.jsonl", "sub/.old/d.jsonl", ".e.jsonl"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text('{"text": "x"}\n')
    assert [os.path.relpath(path, top) for path in shard_reader.shard_paths(top)] == ["a.jsonl", "sub/b.jsonl"]
    assert shard_reader.shard_paths(top / ".work") == [str(top / ".work" / "c.jsonl")]
    assert len(shard_reader.shard_paths(f"{top}/", f"file://{top}")) == 4
