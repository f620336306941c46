"""The rows of a dump of posts, and the join of answers with their questions in bounded memory."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from piledriver.corpus.document import Refusal
from piledriver.corpus.formats.xml.unescape import unescape

MAX_ROW_BYTES = 1 << 24
_BLOCK_BYTES = 1 << 20
_MEMORY_BYTES = 1 << 26
# Questions of so many neighbouring numbers are joined at once.
_BUCKET_POSTS = 100_000
# A quotation mark inside a value is always an entity, so the first one before `/>` ends the row.
_ROW_END = re.compile(rb"\"\s*/>")
# How nearly every row begins; where one does not, its numbers are looked for one by one.
_BEGINNING = re.compile(rb'<row Id="(\d{1,18})" PostTypeId="(\d{1,18})"(?: ParentId="(\d{1,18})")?')


def read_rows(stream: BinaryIO, origin: str) -> Iterator[bytes | Refusal]:
    """Yield each `<row .../>` element as bytes, however the file breaks its lines."""
    window, place, skipping = b"", 0, False
    while block := stream.read(_BLOCK_BYTES):
        window += block
        at = 0
        while True:
            start = 0 if skipping and at == 0 else window.find(b"<row", at)
            if start < 0:
                at = max(at, len(window) - 3)
                break
            end = _ROW_END.search(window, start)
            if end is None:
                at = start
                break
            at = end.end()
            if not skipping:
                yield window[start:at]
            skipping = False
        place += at
        window = window[at:]
        if len(window) > MAX_ROW_BYTES:
            if not skipping:
                yield Refusal("row too long", f"{origin}#{place}", f"more than {MAX_ROW_BYTES} bytes")
            skipping = True
            place += len(window) - 64
            window = window[-64:]
    if len(window) > 8 and b"<row" in window and not skipping:
        yield Refusal("truncated row", f"{origin}#{place}")


def field(row: bytes, name: bytes) -> int | None:
    """Return a number among the attributes of a row, without parsing the row.

    >>> field(b'<row Id="7" ParentId="3" />', b"ParentId")
    3
    """
    start = row.find(b" " + name + b'="')
    if start < 0:
        return None
    start += len(name) + 3
    value = row[start : row.find(b'"', start)]
    return int(value) if value.isdigit() and len(value) < 19 else None


def attribute(row: bytes, place: bytes, *, compiled: bool = False) -> bytes | None:
    """Return the unescaped value of an attribute, by its name as it stands in the row; `None` where it is missing.

    A quotation mark inside a value is always an entity, so the name cannot occur in another value.

    >>> attribute(b'<row Id="7" Title="A &amp;amp; B" />', b' Title="')
    b'A &amp; B'
    """
    start = row.find(place)
    if start < 0:
        return None
    start += len(place)
    end = row.find(b'"', start)
    if end < 0:
        return None
    value = row[start:end]
    return unescape(value, compiled=compiled) if b"&" in value else value


def numbers(row: bytes) -> tuple[int | None, int | None, int | None]:
    """Return the id, kind and parent of a post.

    >>> numbers(b'<row Id="7" PostTypeId="2" ParentId="3" />')
    (7, 2, 3)
    """
    if found := _BEGINNING.match(row):
        parent = found[3]
        if parent is not None or found[2] != b"2":
            return int(found[1]), int(found[2]), int(parent) if parent is not None else None
    return field(row, b"Id"), field(row, b"PostTypeId"), field(row, b"ParentId")


class PostThreads:
    """Rows by the question that they belong to. Small sites stay in memory, large ones go through files."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._waiting: dict[int, list[bytes]] = {}
        self._waiting_bytes = 0
        self._buckets: set[int] = set()

    def __enter__(self) -> PostThreads:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def add(self, question: int, row: bytes) -> None:
        """Add a row under its question."""
        bucket = question // _BUCKET_POSTS
        self._buckets.add(bucket)
        self._waiting.setdefault(bucket, []).append(row)
        self._waiting_bytes += len(row)
        if self._waiting_bytes > _MEMORY_BYTES:
            self._spill()

    def __iter__(self) -> Iterator[list[bytes]]:
        """Yield the rows of each thread by the number of its question: the question, then the answers in file order."""
        for bucket in sorted(self._buckets):
            threads: dict[int, list[bytes]] = {}
            for row in self._rows(bucket):
                number, kind, parent = numbers(row)
                if kind == 2:
                    threads.setdefault(parent or 0, []).append(row)
                else:
                    threads.setdefault(number or 0, []).insert(0, row)
            for question in sorted(threads):
                yield threads[question]

    def _spill(self) -> None:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="piledriver-posts-")
        for bucket, waiting in self._waiting.items():
            with (Path(self._folder.name) / str(bucket)).open("ab") as file:
                for row in waiting:
                    file.write(len(row).to_bytes(4, "little"))
                    file.write(row)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _rows(self, bucket: int) -> Iterator[bytes]:
        path = Path(self._folder.name) / str(bucket) if self._folder is not None else None
        if path is not None and path.exists():
            with path.open("rb") as file:
                while size := file.read(4):
                    yield file.read(int.from_bytes(size, "little"))
        yield from self._waiting.pop(bucket, [])
