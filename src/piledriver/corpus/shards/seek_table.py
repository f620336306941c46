"""Seek table of a shard: where its frames begin, and which documents each one holds.

A shard ends with two skippable zstd frames, which every zstd reader ignores:

- ours: a little-endian uint64 for each frame, the number of documents before it, then one for their total;
- the seek table of zstd's seekable format (contrib/seekable_format): the two sizes of each frame.

The first frame is empty and in the table like the others: a file that begins with it and does not end with a table is
truncated. A reader finds any document from the last bytes of the file: footer, table, binary search, one frame.
"""

from __future__ import annotations

import io
import shlex
import struct
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import zstandard

from piledriver.core.errors import CorruptFileError

_DOCUMENTS_MAGIC = 0x184D2A5D
_SEEK_MAGIC = 0x184D2A5E
_FOOTER_MAGIC = 0x8F92EAB1
# An empty zstd frame with its checksum.
FIRST_FRAME = bytes.fromhex("28b52ffd240001000099e9d851")

REPAIR = "copy or build the shard again, or keep what is intact: piledriver corpus repair {path} -o repaired.jsonl.zst"

_FOOTER = struct.Struct("<IBI")
_HEADER = struct.Struct("<II")


@dataclass(frozen=True)
class SeekTable:
    """Entry i of each array is the total before frame i; a last entry is the total of the file."""

    compressed: npt.NDArray[np.int64]
    decompressed: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]

    @property
    def frame_count(self) -> int:
        """The number of frames."""
        return len(self.compressed) - 1

    @property
    def document_count(self) -> int:
        """The number of documents."""
        return int(self.documents[-1])

    def frame_of(self, document: int) -> int:
        """Return the frame that holds a document."""
        return int(np.searchsorted(self.documents, document, side="right")) - 1


def encode_table(compressed_sizes: list[int], decompressed_sizes: list[int], document_counts: list[int]) -> bytes:
    """Return the two skippable frames that end a shard, from the sizes of its frames."""
    starts = np.concatenate([[0], np.cumsum(document_counts, dtype=np.int64)]).astype("<u8").tobytes()
    sizes = (
        np.stack([compressed_sizes, decompressed_sizes], axis=1).astype("<u4").tobytes() if compressed_sizes else b""
    )
    table = sizes + _FOOTER.pack(len(compressed_sizes), 0, _FOOTER_MAGIC)
    return _HEADER.pack(_DOCUMENTS_MAGIC, len(starts)) + starts + _HEADER.pack(_SEEK_MAGIC, len(table)) + table


def read_table(file: BinaryIO, path: str) -> SeekTable | None:
    """Return the seek table of an open file, or None if another program wrote it. Leaves the file at its start."""
    table = _parse_footer(file)
    file.seek(0)
    if table is None and file.read(len(FIRST_FRAME)) == FIRST_FRAME:
        raise CorruptFileError(f"{path} is truncated: it has no seek table", fix=REPAIR.format(path=shlex.quote(path)))
    file.seek(0)
    return table


def read_frame(file: BinaryIO, path: str, table: SeekTable, frame: int) -> bytes:
    """Return the decompressed lines of one frame."""
    begin, end = table.compressed[frame : frame + 2].tolist()
    file.seek(begin)
    raw = file.read(end - begin)
    size = int(table.decompressed[frame + 1] - table.decompressed[frame])
    try:
        return zstandard.ZstdDecompressor().decompress(raw, max_output_size=size)
    except zstandard.ZstdError as error:
        fix = REPAIR.format(path=shlex.quote(path))
        raise CorruptFileError(f"{path}: frame {frame} is damaged: {error}", fix=fix) from error


def _parse_footer(file: BinaryIO) -> SeekTable | None:
    end = file.seek(0, io.SEEK_END)
    if end < _FOOTER.size:
        return None
    file.seek(end - _FOOTER.size)
    frame_count, flags, magic = _FOOTER.unpack(file.read(_FOOTER.size))
    documents_bytes = 8 * (frame_count + 1)
    table_bytes = 8 * frame_count + _FOOTER.size
    begin = end - _HEADER.size - table_bytes - _HEADER.size - documents_bytes
    if magic != _FOOTER_MAGIC or flags != 0 or begin < 0:
        return None
    file.seek(begin)
    raw = file.read(end - begin)
    if _HEADER.unpack_from(raw, 0) != (_DOCUMENTS_MAGIC, documents_bytes):
        return None
    documents = np.frombuffer(raw, "<u8", frame_count + 1, _HEADER.size).astype(np.int64)
    at = _HEADER.size + documents_bytes
    if _HEADER.unpack_from(raw, at) != (_SEEK_MAGIC, table_bytes):
        return None
    sizes = np.frombuffer(raw, "<u4", 2 * frame_count, at + _HEADER.size).reshape(-1, 2).astype(np.int64)
    ends = np.concatenate([np.zeros((1, 2), np.int64), np.cumsum(sizes, axis=0)])
    if ends[-1, 0] != begin:
        # The table describes other bytes than those before it (a truncated or spliced file).
        return None
    return SeekTable(ends[:, 0], ends[:, 1], documents)
