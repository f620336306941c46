"""The contract of a source: a card, a function that cuts raw files into pieces, and one that parses a piece.

A source is a value, not a class to inherit from. `pieces` runs once, in the parent process, and must be cheap: it only
finds the records. `documents` runs in many worker processes at once and does the real work (parse, convert). Output
follows the order of the pieces, so it does not depend on the number of workers.
"""

from __future__ import annotations

import inspect
import io
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO, Literal, TypeVar, cast

import msgspec

from piledriver.core.errors import UnknownNameError
from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.raw.limits import damage_refusal, read_all
from piledriver.corpus.raw.partial_reads import DAMAGE
from piledriver.corpus.raw.streams import FileRange, RawStream, bare_name, decompressed

MAX_PIECE_BYTES = 1 << 28
COMPILE_FROM_BYTES = 1 << 24
"""Raw bytes from which `Source.prepared` compiles (or loads from the cache) the faster parsers of a source."""
Item = TypeVar("Item")


class Piece(msgspec.Struct, frozen=True):
    """A part of the raw data that can be parsed alone: bytes, or a range of a local file.

    `origin` locates it for a person: `file` or `archive.tar.gz!member`, to which the source adds `#record`. `extra` is
    anything else that the source's `documents` needs (picklable, small).
    """

    origin: str
    data: bytes | None = None
    path: str | None = None
    offset: int = 0
    length: int | None = None
    extra: Any = None

    def open(self) -> BinaryIO:
        """Open the bytes as a stream, with one layer of gzip, bzip2, xz or zstd removed where present."""
        return decompressed(self.open_raw(), self.origin)

    def open_raw(self) -> BinaryIO:
        """Open the bytes as stored."""
        if self.data is not None:
            return io.BytesIO(self.data)
        assert self.path is not None, "a piece has either data or a path"
        return cast(BinaryIO, FileRange(self.path, self.offset, self.length))

    def read(self, limit_bytes: int = MAX_PIECE_BYTES) -> bytes:
        """Return all decompressed bytes; raise `LimitError`, which rejects the piece, above the limit."""
        with self.open() as stream:
            return read_all(stream, limit_bytes)


Found = Document | Refusal
Pieces = Callable[[Iterator[RawStream]], Iterator[Piece | Refusal]]
Documents = Callable[[Piece], Iterable[Found]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One upstream kind of data.

    `documents` yields `Document(text, meta={"origin": ..., "licence": ..., ...})` without id and source: extraction
    normalises the text and adds the name, the source's licence where the document has none, and the stable id. Records
    that are not taken are yielded as a `Refusal` with a reason; none is dropped silently.
    """

    slug: str
    """The name users type."""
    name: str
    """The value of `meta.pile_set_name`."""
    title: str
    """A one-line description."""
    raw_format: str
    """The upstream distribution format, read as downloaded."""
    licence: str
    """The licence of the whole, where one applies; documents may carry their own."""
    consent: Literal["author", "terms", "none", "yours"]
    """As in table 5 of the Pile's paper: the authors agreed, the terms of service allow it, neither, or your files."""
    treatment: str
    """The rules: what is kept, what is rejected, how the text is made, which defects of the original are fixed."""
    documents: Documents
    pieces: Pieces
    wants: Callable[[str], bool]
    """Whether a file or archive member of this name is raw data of this source."""
    citation: str = ""
    compile: Callable[[], Documents] | None = None
    """Compile, or load from the cache, a faster parser, and return the `documents` that uses it; same output."""
    text_kind: Literal["prose", "code"] = "prose"
    """Prose is normalised; code is kept but for bytes that no text may hold."""

    def with_settings(self, **settings: Any) -> Source:
        """Return this source with keyword settings of its `documents` bound, such as `extractor=` of `html`.

        Settings are for callers in Python (`extract_files`); recipes and the command line have none.
        """
        parameters = inspect.signature(self.documents).parameters.values()
        known = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        for name in settings:
            if name not in known:
                raise UnknownNameError(f"setting of source {self.slug}", name, known)
        return replace(self, documents=partial(self.documents, **settings))

    def prepared(self, raw_bytes: int) -> Source:
        """Return this source for an input of `raw_bytes`: with its compiled parser from `COMPILE_FROM_BYTES` on.

        Compiling takes seconds, so small inputs are faster without. The parent calls it before the workers, which then
        load the compiled code from the cache, and before the time limit of a piece starts.
        """
        if self.compile is None or raw_bytes < COMPILE_FROM_BYTES:
            return self
        return replace(self, documents=self.compile())


def piece_bytes(piece: Piece | Refusal) -> int:
    """Return the size of a piece, an estimate of the work it takes."""
    if isinstance(piece, Refusal):
        return 0
    if piece.data is not None:
        return len(piece.data)
    if piece.length is not None or piece.path is None:
        return piece.length or 0
    return os.path.getsize(piece.path)


def per_file(split: Callable[[RawStream], Iterator[Piece | Refusal]]) -> Pieces:
    """Return the `pieces` of a source whose files are independent: `split` is called for each."""

    def pieces(streams: Iterator[RawStream]) -> Iterator[Piece | Refusal]:
        for stream in streams:
            yield from stop_at_damage(stream.origin, split(stream))

    return pieces


def stop_at_damage(origin: str, found: Iterable[Item]) -> Iterator[Item | Refusal]:
    """Yield what is found in a file up to the first damage, then one refusal; later files are not affected."""
    try:
        yield from found
    except DAMAGE as error:
        yield damage_refusal(origin, error)


def one_piece(stream: RawStream, *, as_stored: bool = False) -> Iterator[Piece]:
    """Yield a whole file or archive member as one piece: by its path where a worker can open it, else by its bytes.

    The bytes are decompressed, unless `as_stored`.
    """
    if stream.path is not None:
        yield Piece(stream.origin, path=stream.path)
    else:
        yield Piece(stream.origin, data=read_all(stream.raw if as_stored else stream.file, MAX_PIECE_BYTES))


def group_by_size(
    found: Iterable[Item | Refusal], size: Callable[[Item], int], enough: int
) -> Iterator[list[Item] | Refusal]:
    """Yield lists of items whose sizes sum to `enough` or more, the last one to less; refusals at once."""
    batch: list[Item] = []
    held = 0
    for item in found:
        if isinstance(item, Refusal):
            yield item
            continue
        batch.append(item)
        held += size(item)
        if held >= enough:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def ends_with(*suffixes: str) -> Callable[[str], bool]:
    """Return a `wants` by case-insensitive suffix; a compression suffix may follow.

    >>> ends_with(".xml")("Posts.XML.gz")
    True
    """

    return lambda name: bare_name(name).endswith(suffixes)
