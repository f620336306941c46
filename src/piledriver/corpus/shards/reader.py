"""Read documents from `jsonl.zst` shards, ours or anybody's: text and meta, or text alone, from any document on.

Files with our seek table are read frame by frame, from any document, and by any number of processes at once (`part`).
Files that others wrote (one frame, no table, gzip, plain jsonl, `text` as a list of paragraphs, no meta) are read as
streams. Memory is bounded by the frame, or by the longest line.
"""

from __future__ import annotations

import gzip
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import msgspec
import zstandard

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError, StorageError, UsageError
from piledriver.corpus.document import Document, document_id
from piledriver.corpus.shards import seek_table
from piledriver.corpus.shards.seek_table import SeekTable

MAX_LINE_BYTES = 1 << 28
_BLOCK_BYTES = 1 << 20
_SUFFIXES = (".jsonl.zst", ".json.zst", ".jsonl.gz", ".json.gz", ".jsonl", ".ndjson")

OnBad = Callable[[str, int, str], None]


class _Row(msgspec.Struct, gc=False):
    text: str
    meta: dict[str, Any] = {}


class _Text(msgspec.Struct, gc=False):
    text: str


class _Loose(msgspec.Struct, gc=False):
    """What other people's files hold: text as paragraphs, meta absent or no object, an id at the top level."""

    text: str | list[str]
    meta: Any = None
    id: Any = None


_rows = msgspec.json.Decoder(_Row)
_texts = msgspec.json.Decoder(_Text)
_loose = msgspec.json.Decoder(_Loose)


@dataclass(frozen=True)
class Part:
    """Share `index` of `count` equal shares of a file's frames: how several processes read one file."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UsageError(f"part {self.index} of {self.count} does not exist", fix=f"use 0 to {self.count - 1}")


def shard_paths(*locations: storage.Location) -> list[str]:
    """The shard files that files and folders stand for, in reading order. A name that stands for none is an error.

    Hidden files and folders below a folder are not read: a build keeps its work there.
    """
    paths: list[str] = []
    for location in locations:
        if not storage.is_remote(location) and os.path.isfile(location):
            paths.append(str(location))
            continue
        found = [
            path
            for path in storage.files_below(location)
            if path.endswith(_SUFFIXES) and not _is_hidden(path, location)
        ]
        if not found:
            storage.require(location)
            raise StorageError(f"{location} holds no shards", fix=f"give a file or folder with {', '.join(_SUFFIXES)}")
        paths += found
    return paths


def _is_hidden(path: str, below: storage.Location) -> bool:
    top = str(below).rstrip("/")
    # What stands before the folder is the user's to name; a remote path may come back in another spelling.
    inside = path.removeprefix(top) if path.startswith(top) else path.rpartition(top.rpartition("/")[2])[2]
    return any(part.startswith(".") for part in inside.strip("/").split("/"))


def count_documents(path: storage.Location) -> int:
    """How many documents a shard holds: from its seek table, or by reading it where it has none."""
    with storage.open_read(path) as file:
        table = seek_table.read(file, str(path))
    return table.document_count if table is not None else sum(1 for _ in read_shards(path))


def read_shards(
    *locations: storage.Location, start: int = 0, part: Part | None = None, on_bad: OnBad | None = None
) -> Iterator[Document]:
    """The documents of shards in order.

    `start` skips that many documents of the whole sequence in constant time where files have a seek table. `part` reads
    one share of the frames. A line that is no document raises `CorruptFileError`, or goes to `on_bad(path, line, why)`.
    """
    for lines, path, first in _blocks(locations, start, part, on_bad):
        yield from _documents(lines, path, first, on_bad)


def read_texts(*locations: storage.Location, start: int = 0, part: Part | None = None) -> Iterator[str]:
    """The texts alone, faster than `read_shards`: only `text` is decoded."""
    for lines, path, first in _blocks(locations, start, part, None):
        try:
            yield from [row.text for row in _texts.decode_lines(lines)]
        except (msgspec.DecodeError, UnicodeDecodeError):
            # Paragraphs in place of a text, or a bad line: the slower reader takes the one and names the other.
            yield from [document.text for document in _documents(lines, path, first, None)]


def _documents(lines: bytes, path: str, first: int, on_bad: OnBad | None) -> Iterator[Document]:
    try:
        rows = _rows.decode_lines(lines)
    except (msgspec.DecodeError, UnicodeDecodeError):
        rows = None
    if rows is not None:
        for number, row in enumerate(rows, first):
            yield _document(row.text, row.meta, path, number)
        return
    for number, line in enumerate(lines.split(b"\n"), first):
        if not line.strip():
            continue
        try:
            loose = _loose.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _bad(path, number, f"line is not a document: {error}", on_bad)
            continue
        text = loose.text if isinstance(loose.text, str) else "\n\n".join(loose.text)
        meta = dict(loose.meta) if isinstance(loose.meta, dict) else {}
        if loose.id is not None:
            meta.setdefault("id", str(loose.id))
        yield _document(text, meta, path, number)


def _document(text: str, meta: dict[str, Any], path: str, number: int) -> Document:
    source = meta.pop("pile_set_name", "")
    own_id = meta.pop("id", None)
    if not isinstance(source, str):
        source = str(source)
    if own_id is None:
        own_id = document_id(text, source, f"{os.path.basename(path)}#{number}")
    return Document(text, own_id if isinstance(own_id, str) else str(own_id), source, meta)


def _bad(path: str, number: int, why: str, on_bad: OnBad | None) -> None:
    if on_bad is None:
        whole = f"piledriver corpus extract jsonl {shlex.quote(path)} -o whole.jsonl.zst"
        raise CorruptFileError(
            f"{path}: document {number}: {why}", fix=f"repair the line, or keep only the whole ones: {whole}"
        )
    on_bad(path, number, why)


def _blocks(
    locations: Iterable[storage.Location], start: int, part: Part | None, on_bad: OnBad | None
) -> Iterator[tuple[bytes, str, int]]:
    """(whole lines, path, number of the first of them) over all files, from document `start` on."""
    for path in shard_paths(*locations):
        with storage.open_read(path) as file:
            table = seek_table.read(file, path) if path.endswith(".zst") else None
            if table is None:
                if part is not None:
                    raise UsageError(
                        f"{path} has no seek table, so it cannot be read in parts", fix="rewrite it with ShardWriter"
                    )
                for lines, number in _stream_blocks(file, path, on_bad):
                    count = lines.count(b"\n")
                    if start < count:
                        yield _after(lines, start), path, number + start
                    start = max(0, start - count)
                continue
            if start >= table.document_count:
                start -= table.document_count
                continue
            for lines, number in _table_blocks(file, path, table, start, part):
                yield lines, path, number
            start = 0


def _table_blocks(
    file: BinaryIO, path: str, table: SeekTable, start: int, part: Part | None
) -> Iterator[tuple[bytes, int]]:
    decompressor = zstandard.ZstdDecompressor()
    first_frame = table.frame_of(start) if start else 0
    last_frame = table.frame_count
    if part is not None:
        frames = last_frame - first_frame
        first_frame, last_frame = (first_frame + frames * edge // part.count for edge in (part.index, part.index + 1))
    file.seek(int(table.compressed[first_frame]))
    for frame in range(first_frame, last_frame):
        if table.documents[frame] == table.documents[frame + 1]:
            file.seek(int(table.compressed[frame + 1]))
            continue
        raw = file.read(int(table.compressed[frame + 1] - table.compressed[frame]))
        try:
            lines = decompressor.decompress(
                raw, max_output_size=int(table.decompressed[frame + 1] - table.decompressed[frame])
            )
        except zstandard.ZstdError as error:
            raise CorruptFileError(
                f"{path}: frame {frame} is damaged: {error}", fix="build or copy the shard again"
            ) from error
        number = int(table.documents[frame])
        skip = max(0, start - number)
        yield _after(lines, skip), number + skip


def _stream_blocks(file: BinaryIO, path: str, on_bad: OnBad | None) -> Iterator[tuple[bytes, int]]:
    """Whole lines from a compressed or plain stream; a line longer than `MAX_LINE_BYTES` is refused, not held."""
    carry: list[bytes] = []
    carried = number = 0
    too_long = False
    stream = _decompressed(file, path)
    try:
        while block := stream.read(_BLOCK_BYTES):
            cut = block.rfind(b"\n") + 1
            if cut and not too_long:
                lines = b"".join([*carry, block[:cut]])
                yield lines, number
                number += lines.count(b"\n")
            elif cut:
                cut_first = block.find(b"\n") + 1
                _bad(path, number, f"line is longer than {MAX_LINE_BYTES} bytes", on_bad)
                number += 1
                if cut_first < cut:
                    yield block[cut_first:cut], number
                    number += block.count(b"\n", cut_first, cut)
            if cut:
                carry, carried, too_long = [], 0, False
            if not too_long:
                carry.append(block[cut:])
                carried += len(block) - cut
            if carried > MAX_LINE_BYTES:
                carry, carried, too_long = [], 0, True
    except (zstandard.ZstdError, OSError, EOFError) as error:
        raise CorruptFileError(
            f"{path} is damaged near document {number}: {error}", fix="fetch or build the file again"
        ) from error
    if too_long:
        _bad(path, number, f"line is longer than {MAX_LINE_BYTES} bytes", on_bad)
    elif carried:
        yield b"".join(carry) + b"\n", number


def _decompressed(file: BinaryIO, path: str) -> BinaryIO:
    if path.endswith(".zst"):
        return cast(BinaryIO, _ZstdStream(file))
    if path.endswith(".gz"):
        return cast(BinaryIO, gzip.GzipFile(fileobj=file))
    return file


class _ZstdStream:
    """All the frames of a zstd file as one stream; a file that ends inside a frame is an error, not a short file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._begun = False
        self._rest = b""

    def read(self, size: int) -> bytes:
        """About `size` compressed bytes' worth of content; nothing only at the end of the file."""
        while True:
            raw = self._rest or self._file.read(size)
            if not raw:
                if self._begun:
                    raise EOFError("the file ends inside a zstd frame")
                return b""
            self._begun, self._rest = True, b""
            content: bytes = self._frame.decompress(raw)
            if self._frame.eof:
                self._rest, self._begun = self._frame.unused_data, False
                self._frame = self._decompressor.decompressobj()
            if content:
                return content


def _after(lines: bytes, skip: int) -> bytes:
    """The lines after the first `skip` of them."""
    at = 0
    for _ in range(skip):
        at = lines.index(b"\n", at) + 1
    return lines[at:] if skip else lines
