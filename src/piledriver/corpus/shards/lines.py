"""Shards by their lines: take documents out and join shards without parsing what is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError
from piledriver.corpus.document import to_line
from piledriver.corpus.shards.reader import read_shards
from piledriver.corpus.shards.seek_table import FIRST_FRAME, encode_table, read_frame, read_table


def read_lines(path: str, first: int = 0, count: int | None = None) -> Iterator[bytes]:
    """Yield lines with their newlines from document `first` on. Rows of other programs are converted to our layout."""
    with storage.open_read(path) as file:
        table = read_table(file, path) if path.endswith(".zst") else None
        if table is None:
            yield from islice(map(to_line, read_shards(path, start=first)), count)
            return
        end = table.document_count if count is None else min(first + count, table.document_count)
        for frame in range(table.frame_of(first), table.frame_count):
            low, high = table.documents[frame : frame + 2].tolist()
            if low >= end:
                return
            if low < high:
                lines = read_frame(file, path, table, frame).split(b"\n")
                for line in lines[max(0, first - low) : min(high, end) - low]:
                    yield line + b"\n"


def join_shards(parts: Iterable[str], path: str) -> dict[str, Any]:
    """Write the frames of some shards to one, without decompressing them; return its entry in a manifest."""
    digest = hashlib.sha256()
    sizes: tuple[list[int], list[int], list[int]] = ([], [], [])

    with storage.atomic_write(path) as out:

        def put(frame: bytes, *added: int) -> None:
            out.write(frame)
            digest.update(frame)
            for values, value in zip(sizes, added, strict=False):
                values.append(value)

        put(FIRST_FRAME, len(FIRST_FRAME), 0, 0)
        for part in parts:
            with storage.open_read(part) as file:
                table = read_table(file, part)
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
        put(encode_table(*sizes))
        written = out.tell()
    return {"documents": sum(sizes[2]), "bytes": written, "sha256": digest.hexdigest()}


def decompressed_bytes(path: str) -> int:
    """Return the bytes of a shard's lines, from its seek table."""
    with storage.open_read(path) as file:
        table = read_table(file, path)
    return int(table.decompressed[-1]) if table is not None else 0
