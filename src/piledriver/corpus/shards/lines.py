"""Shards by their lines: for work that takes documents out or puts shards together without parsing what it keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import zstandard

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError
from piledriver.corpus.document import to_line
from piledriver.corpus.shards import seek_table
from piledriver.corpus.shards.reader import read_shards


def read_lines(path: str, first: int = 0, count: int | None = None) -> Iterator[bytes]:
    """Lines with their newlines, from document `first` on. Files that others wrote are brought into our form."""
    with storage.open_read(path) as file:
        table = seek_table.read(file, path) if path.endswith(".zst") else None
        if table is None:
            yield from islice(map(to_line, read_shards(path, start=first)), count)
            return
        end = table.document_count if count is None else min(first + count, table.document_count)
        decompressor = zstandard.ZstdDecompressor()
        for frame in range(table.frame_of(first), table.frame_count):
            low, high = int(table.documents[frame]), int(table.documents[frame + 1])
            if low >= end:
                return
            if low == high:
                continue
            file.seek(int(table.compressed[frame]))
            raw = file.read(int(table.compressed[frame + 1] - table.compressed[frame]))
            size = int(table.decompressed[frame + 1] - table.decompressed[frame])
            try:
                lines = decompressor.decompress(raw, max_output_size=size).split(b"\n")
            except zstandard.ZstdError as error:
                raise CorruptFileError(
                    f"{path}: frame {frame} is damaged: {error}", fix="build or copy the shard again"
                ) from error
            for line in lines[max(0, first - low) : min(high, end) - low]:
                yield line + b"\n"


def join_shards(parts: Iterable[str], path: str) -> dict[str, Any]:
    """One shard from the frames of others, none of which is decompressed; returns what a manifest says of it."""
    digest = hashlib.sha256()
    sizes: tuple[list[int], list[int], list[int]] = ([], [], [])

    with storage.atomic_write(path) as out:

        def put(frame: bytes, *added: int) -> None:
            out.write(frame)
            digest.update(frame)
            for values, value in zip(sizes, added, strict=False):
                values.append(value)

        put(seek_table.FIRST_FRAME, len(seek_table.FIRST_FRAME), 0, 0)
        for part in parts:
            with storage.open_read(part) as file:
                table = seek_table.read(file, part)
                if table is None:
                    raise CorruptFileError(f"{part} has no seek table", fix="run the command again")
                for frame in range(table.frame_count):
                    compressed, decompressed, documents = (
                        int(array[frame + 1] - array[frame])
                        for array in (table.compressed, table.decompressed, table.documents)
                    )
                    raw = file.read(compressed)
                    if documents:
                        put(raw, compressed, decompressed, documents)
        put(seek_table.encode(*sizes))
        written = out.tell()
    return {"documents": sum(sizes[2]), "bytes": written, "sha256": digest.hexdigest()}


def lines_bytes(path: str) -> int:
    """How many bytes of lines a shard holds."""
    with storage.open_read(path) as file:
        table = seek_table.read(file, path)
    return int(table.decompressed[-1]) if table is not None else 0


def grouped(parts: Sequence[str], most_bytes: int) -> Iterator[list[str]]:
    """Parts in groups of about so many bytes of lines."""
    group: list[str] = []
    filled = 0
    for part in parts:
        group.append(part)
        filled += lines_bytes(part)
        if filled >= most_bytes:
            yield group
            group, filled = [], 0
    if group:
        yield group
