"""Parquet: one row, one document."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from piledriver.core.errors import MissingDependencyError
from piledriver.corpus.document import Refusal
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, one_piece, per_file
from piledriver.corpus.sources.shared.rows import record_document

_ROWS_AT_ONCE = 256


def _split(stream: RawStream) -> Iterator[Piece | Refusal]:
    """Yield one piece for each row group of a file, or a whole archive member."""
    if stream.path is None:
        yield from one_piece(stream, as_stored=True)
        return
    try:
        groups = _opened(stream.path).num_row_groups
    except (OSError, ValueError) as error:
        yield _refused(stream.origin, error)
        return
    for group in range(groups):
        yield Piece(stream.origin, path=stream.path, extra=group)


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield the rows of a row group."""
    try:
        file = _opened(piece.path if piece.path is not None else io.BytesIO(piece.data or b""))
        groups = [piece.extra] if piece.extra is not None else range(file.num_row_groups)
    except (OSError, ValueError) as error:
        yield _refused(piece.origin, error)
        return
    for group in groups:
        row = 0
        # A damaged row group costs only its own unreadable rows.
        try:
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=[group]):
                for record in batch.to_pylist():
                    yield record_document(record, f"{piece.origin}#{group}:{row}")
                    row += 1
        except (OSError, ValueError) as error:
            yield _refused(f"{piece.origin}#{group}:{row}", error)


def _refused(origin: str, error: Exception) -> Refusal:
    said = " ".join(str(error).split())[:200]
    return Refusal("encrypted file" if "encrypt" in said.lower() else "invalid parquet", origin, said)


def _opened(where: Any) -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingDependencyError("pyarrow", extra="corpus", purpose="reading parquet") from None
    return pq.ParquetFile(where, page_checksum_verification=True)


SOURCE = Source(
    slug="parquet",
    name="Parquet",
    title="Parquet files of one's own or of other corpora",
    raw_format="Parquet files with a text column",
    licence="yours",
    consent="yours",
    treatment=(
        "The text is the first of the usual columns (text, content, body, ...), all other columns become meta, "
        "dates as text. Row groups are read by workers in parallel, a few hundred rows at a time."
    ),
    wants=ends_with(".parquet", ".pq"),
    pieces=per_file(_split),
    documents=_documents,
)
