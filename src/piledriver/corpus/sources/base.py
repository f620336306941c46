"""What a source of raw data is: a card, how its files are cut into pieces, and how a piece becomes documents.

A source is a value, not a class to inherit from. Its two functions are apart because they run apart: `pieces` runs
once, in the parent process, and must be cheap (find the records); `documents` runs in many worker processes at once and
does the real work (parse, convert). The output order is the order of the pieces, so the number of workers never shows.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, TypeVar, cast

import msgspec

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.raw.partial_reads import DAMAGE, read_whole
from piledriver.corpus.raw.streams import FileRange, RawStream, decompressed

MAX_PIECE_BYTES = 1 << 28
MUCH_BYTES = 1 << 24
"""Of raw data: from here on it pays to load, or even to make, compiled code."""
Item = TypeVar("Item")


class Piece(msgspec.Struct, frozen=True):
    """A part of the raw data that can be parsed alone: bytes that the parent read, or a place in a local file.

    `origin` is what a person needs to find it again: `file`, `archive.tar.gz!member`, with `#record` added by the
    source. `extra` is whatever the source's `documents` wants to know besides (picklable, small).
    """

    origin: str
    data: bytes | None = None
    path: str | None = None
    offset: int = 0
    length: int | None = None
    extra: Any = None

    def open(self) -> BinaryIO:
        """The bytes as a stream, with one layer of gzip, bzip2, xz or zstd taken off where there is one."""
        return decompressed(self.open_raw(), self.origin)

    def open_raw(self) -> BinaryIO:
        """The bytes as they are."""
        if self.data is not None:
            return io.BytesIO(self.data)
        assert self.path is not None, "a piece has either data or a path"
        return cast(BinaryIO, FileRange(self.path, self.offset, self.length))

    def read(self, limit_bytes: int = MAX_PIECE_BYTES) -> bytes:
        """All the (decompressed) bytes; more than the limit is a `ValueError`, which refuses the piece."""
        with self.open() as stream:
            content = read_whole(stream, limit_bytes)
        if len(content) > limit_bytes:
            raise ValueError(f"larger than {limit_bytes} bytes")
        return content


Found = Document | Refusal
Pieces = Callable[[Iterator[RawStream]], Iterator[Piece | Refusal]]
Documents = Callable[[Piece], Iterable[Found]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One upstream kind of data.

    `documents` yields `Document(text, meta={"origin": ..., "licence": ..., ...})` without id and source: extraction
    normalises the text, fills in the name, the licence of the whole source where the document has none of its own, and
    the stable id. What is not taken is yielded as a `Refusal` with its reason; nothing is dropped in silence.
    """

    slug: str
    """What users type."""
    name: str
    """`meta.pile_set_name`."""
    title: str
    """One line: what it is."""
    raw_format: str
    """The upstream distribution format that is read as downloaded."""
    licence: str
    """The licence of the whole, as far as one can say; documents may carry their own."""
    consent: Literal["author", "terms", "none", "yours"]
    """The Pile's table 5: authors agreed; the terms of service allow it; neither; or the user's own files."""
    treatment: str
    """The rules: what is kept, what is refused, how the text is made, and which bugs of the original are mended."""
    documents: Documents
    pieces: Pieces
    wants: Callable[[str], bool]
    """Whether a file or archive member with this name is raw data of this source."""
    citation: str = ""
    prepare: Callable[..., object] | None = None
    """`prepare(much)` is run before the pieces, outside of the time that one may take, with whether there is much to
    read (`MUCH_BYTES`): then what can be compiled is compiled, in the parent first of all, so that workers find it in
    the cache. Otherwise slower ways give the same text sooner."""
    text_kind: Literal["prose", "code"] = "prose"
    """Prose is normalised; code is kept as it is but for bytes that no text may hold."""


def piece_bytes(piece: Piece | Refusal) -> int:
    """About how much work a piece is."""
    if isinstance(piece, Refusal):
        return 0
    if piece.data is not None:
        return len(piece.data)
    if piece.length is not None or piece.path is None:
        return piece.length or 0
    return os.path.getsize(piece.path)


def each(split: Callable[[RawStream], Iterator[Piece | Refusal]]) -> Pieces:
    """`pieces` of a source whose files have nothing to do with each other."""

    def pieces(streams: Iterator[RawStream]) -> Iterator[Piece | Refusal]:
        for stream in streams:
            yield from until_damaged(stream.origin, split(stream))

    return pieces


def until_damaged(origin: str, found: Iterable[Item]) -> Iterator[Item | Refusal]:
    """What is found in a file up to where it is damaged, then a refusal; the next file has nothing to do with it."""
    try:
        yield from found
    except DAMAGE as error:
        yield damaged(origin, error)


def damaged(origin: str, error: BaseException) -> Refusal:
    """The refusal of a file that cannot be read, or not to its end."""
    return Refusal(reason_of(error), origin, f"{type(error).__name__}: {error}"[:500])


def reason_of(error: BaseException) -> str:
    """Why a file could not be read, or not to its end."""
    forbidden = isinstance(error, PermissionError) or isinstance(error.__cause__, PermissionError)
    return "no permission to read" if forbidden else "damaged data"


def whole(stream: RawStream) -> Iterator[Piece | Refusal]:
    """One piece for a whole file or archive member: by its path where a worker can open it, else with its bytes."""
    if stream.path is not None:
        yield Piece(stream.origin, path=stream.path)
        return
    content = read_whole(stream.file, MAX_PIECE_BYTES)
    if len(content) > MAX_PIECE_BYTES:
        yield Refusal("too large", stream.origin, f"more than {MAX_PIECE_BYTES} bytes")
    else:
        yield Piece(stream.origin, data=content)


def ends_with(*suffixes: str) -> Callable[[str], bool]:
    """A `wants` by the ends of names, in any case; a compression suffix may follow.

    >>> ends_with(".xml")("Posts.XML.gz")
    True
    """

    def wants(name: str) -> bool:
        lowered = name.lower()
        for compression in (".gz", ".bz2", ".xz", ".zst"):
            lowered = lowered.removesuffix(compression)
        return lowered.endswith(suffixes)

    return wants
