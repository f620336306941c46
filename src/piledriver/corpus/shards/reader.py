"""Read documents from `jsonl.zst` shards: text and meta, or text alone, from any document on.

Files with our seek table are read frame by frame, from any document, and by several processes at once (`part`). Files
of other programs (one frame, no table, gzip, plain JSON lines; text as a list of paragraphs, further fields, no meta)
are read as streams. Memory is bounded by the frame, or by the longest line.
"""

from __future__ import annotations

import gzip
import json
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import msgspec
import zstandard

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError, StorageError, UsageError
from piledriver.corpus.document import Document, document_id, replace_surrogates
from piledriver.corpus.shards.seek_table import REPAIR, SeekTable, read_frame, read_table

MAX_LINE_BYTES = 1 << 28
_BLOCK_BYTES, _COMPRESSED_BYTES = 1 << 20, 1 << 16
_SUFFIXES = (".jsonl.zst", ".json.zst", ".jsonl.gz", ".json.gz", ".jsonl", ".ndjson")

OnBad = Callable[[str, int, str], None]
"""Called with the path, the document's number and the reason for each line or frame that cannot be read."""


class _Row(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    text: str
    meta: dict[str, Any] = {}


class _Text(msgspec.Struct, gc=False):
    text: str


class _ForeignRow(msgspec.Struct, gc=False):
    text: str | list[str]


_rows = msgspec.json.Decoder(_Row)
_texts = msgspec.json.Decoder(_Text)
_objects = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True)
class Part:
    """Part `index` of `count` equal parts of a file's frames, for several processes that read one file."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UsageError(f"part {self.index} of {self.count} does not exist", fix=f"use 0 to {self.count - 1}")


def shard_paths(*locations: storage.Location) -> list[str]:
    """Return the shards that files and folders name, in reading order; raise for a location without any.

    Hidden files and folders below a folder are skipped: a build keeps its work there.
    """
    paths: list[str] = []
    for location in locations:
        if not storage.is_remote(location) and os.path.isfile(location):
            paths.append(str(location))
            continue
        below = storage.files_below(location)
        found = [path for path in below if path.endswith(_SUFFIXES) and not _is_hidden(path, location)]
        if not found:
            storage.require(location)
            raise StorageError(f"{location} holds no shards", fix=f"give a file or folder with {', '.join(_SUFFIXES)}")
        paths += found
    return paths


def shard_stem(path: str) -> str:
    """Return a shard's path without its suffix."""
    return next(path.removesuffix(suffix) for suffix in (*_SUFFIXES, "") if path.endswith(suffix))


def _is_hidden(path: str, below: storage.Location) -> bool:
    top = str(below).rstrip("/")
    # A remote path may come back in another spelling.
    inside = path.removeprefix(top) if path.startswith(top) else path.rpartition(top.rpartition("/")[2])[2]
    return any(part.startswith(".") for part in inside.strip("/").split("/"))


def count_documents(path: storage.Location) -> int:
    """Return the number of documents in a shard: from its seek table, or by reading a file without one."""
    with storage.open_read(path) as file:
        table = read_table(file, str(path))
    return table.document_count if table is not None else sum(1 for _ in read_shards(path))


def read_shards(
    *locations: storage.Location, start: int = 0, part: Part | None = None, on_bad: OnBad | None = None
) -> Iterator[Document]:
    """Yield the documents of shards in order.

    `start` skips that many documents of the whole sequence, in constant time if files have a seek table. `part` reads
    one part of the frames. Damage raises `CorruptFileError`, or is passed to `on_bad(path, document, reason)` and
    skipped.
    """
    for lines, path, first in _blocks(locations, start, part, on_bad):
        yield from _documents(lines, path, first, on_bad)


def read_texts(*locations: storage.Location, start: int = 0, part: Part | None = None) -> Iterator[str]:
    """Yield the texts alone: faster than `read_shards`, because only `text` is decoded."""
    for lines, path, first in _blocks(locations, start, part, None):
        try:
            yield from [row.text for row in _texts.decode_lines(lines)]
        except (msgspec.DecodeError, UnicodeDecodeError):
            # A list of paragraphs, a lone surrogate, or a bad line: the slower reader accepts or reports it.
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
        if line.strip():
            try:
                text, meta = _foreign_row(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                _bad(path, number, f"line is not a document: {error}", on_bad)
            else:
                yield _document(text, meta, path, number)


def _foreign_row(line: bytes) -> tuple[str, dict[str, Any]]:
    """Return (text, meta) of a row of another program; fields beside `text` and `meta` become meta."""
    try:
        row = _objects.decode(line)
    except msgspec.DecodeError:
        # Python's json writes lone surrogates, which msgspec rejects.
        try:
            row = msgspec.convert(replace_surrogates(json.loads(line)), dict[str, Any])
        except ValueError as error:
            raise msgspec.DecodeError(str(error)) from error
    text = msgspec.convert(row, _ForeignRow).text
    inner = row.get("meta")
    meta = {key: value for key, value in row.items() if key not in ("text", "meta")}
    return text if isinstance(text, str) else "\n\n".join(text), meta | (inner if isinstance(inner, dict) else {})


def _document(text: str, meta: dict[str, Any], path: str, number: int) -> Document:
    source = str(meta.pop("pile_set_name", ""))
    own_id = meta.pop("id", None)
    if own_id is None:
        own_id = document_id(text, source, f"{os.path.basename(path)}#{number}")
    return Document(text, str(own_id), source, meta)


def _bad(path: str, number: int, why: str, on_bad: OnBad | None) -> None:
    if on_bad is None:
        fix = REPAIR.format(path=shlex.quote(path))
        raise CorruptFileError(f"{path}: document {number}: {why}", fix=fix)
    on_bad(path, number, why)


def _blocks(
    locations: Iterable[storage.Location], start: int, part: Part | None, on_bad: OnBad | None
) -> Iterator[tuple[bytes, str, int]]:
    """Yield (whole lines, path, number of the first of them) over all files, from document `start` on."""
    for path in shard_paths(*locations):
        with storage.open_read(path) as file:
            table = _table(file, path, on_bad)
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
            for lines, number in _table_blocks(file, path, table, start, part, on_bad):
                yield lines, path, number
            start = 0


def _table(file: BinaryIO, path: str, on_bad: OnBad | None) -> SeekTable | None:
    try:
        return read_table(file, path) if path.endswith(".zst") else None
    except CorruptFileError as error:
        if on_bad is None:
            raise
        on_bad(path, 0, error.what)
        file.seek(0)
        return None


def _table_blocks(
    file: BinaryIO, path: str, table: SeekTable, start: int, part: Part | None, on_bad: OnBad | None
) -> Iterator[tuple[bytes, int]]:
    first, last = table.frame_of(start) if start else 0, table.frame_count
    if part is not None:
        first, last = (first + (last - first) * edge // part.count for edge in (part.index, part.index + 1))
    for frame in range(first, last):
        number, after = table.documents[frame : frame + 2].tolist()
        if number < after:
            try:
                lines = read_frame(file, path, table, frame)
            except CorruptFileError as error:
                if on_bad is None:
                    raise
                on_bad(path, number, f"{error.what.removeprefix(f'{path}: ')}, {after - number} documents")
                continue
            skip = max(0, start - number)
            yield _after(lines, skip), number + skip


def _stream_blocks(file: BinaryIO, path: str, on_bad: OnBad | None) -> Iterator[tuple[bytes, int]]:
    """Yield whole lines of a compressed or plain stream; a line longer than `MAX_LINE_BYTES` is bad and not held."""
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
        why = f"the file is damaged: {error}"
        if on_bad is None:
            fix = REPAIR.format(path=shlex.quote(path))
            raise CorruptFileError(f"{path}: document {number}: {why}", fix=fix) from error
        on_bad(path, number, why)
        return
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
    """The frames of a zstd file as one stream; a file that ends inside a frame raises `EOFError`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._begun = False
        self._rest = b""

    def read(self, size: int) -> bytes:
        """Return the content of about `size` compressed bytes; empty only at the end of the file."""
        while True:
            # In small parts: what is decompressed before damage in a part would be lost with it.
            raw = self._rest or self._file.read(min(size, _COMPRESSED_BYTES))
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
    """Return the lines after the first `skip`."""
    at = 0
    for _ in range(skip):
        at = lines.index(b"\n", at) + 1
    return lines[at:] if skip else lines
