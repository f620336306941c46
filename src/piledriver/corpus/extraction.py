"""Extract the documents of one source from raw files: in parallel, in a fixed order, with every refusal counted."""

from __future__ import annotations

import lzma
import os
import signal
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
import zstandard

from piledriver.core import storage
from piledriver.core.batches import batches_by_size
from piledriver.core.errors import PiledriverError, UsageError
from piledriver.core.progress import progress
from piledriver.core.worker_pool import FailedTask, WorkerPool
from piledriver.corpus.document import Document, Refusal, make_document, refusal_line, to_line
from piledriver.corpus.raw.limits import damage_refusal
from piledriver.corpus.raw.partial_reads import DAMAGE
from piledriver.corpus.raw.streams import OnBytes, OnSkipped, RawStream, local_files, raw_streams
from piledriver.corpus.shards.writer import SUFFIX, ShardFileWriter
from piledriver.corpus.sources import SOURCES
from piledriver.corpus.sources.base import Found, Piece, Source, piece_bytes
from piledriver.corpus.text.normalise import normalise, normalise_code

_BATCH_PIECES = 256
_BATCH_BYTES = 1 << 20
_PIECE_SECONDS = 120
_SKIPPED_SHOWN = 5


@dataclass(frozen=True)
class ExtractSummary:
    """The counts of one extraction."""

    source: str
    out: str
    documents: int
    text_bytes: int
    compressed_bytes: int
    sha256: str
    refused: dict[str, int]
    licences: dict[str, int]
    passed_over: dict[str, int]
    """Files skipped in folders because of their names, by suffix."""
    skipped_files: list[str]
    """The first of them; they may be data under another name."""


def extract(
    slug: str, paths: Sequence[str], out: storage.Location, *, rejects: storage.Location | None = None, workers: int = 1
) -> ExtractSummary:
    """Extract the documents of a source from raw files, folders and archives into `out`.

    `rejects` gets one JSON line for each refusal, with reason and origin. The bytes of both files do not depend on the
    number of workers. Neither file is written where no document was found.
    """
    for path in (out, rejects):
        if path is not None and not str(path).endswith(SUFFIX):
            raise UsageError(f"{path} must end in {SUFFIX}", fix=f"write to {path}{SUFFIX}")
    total_bytes = sum(storage.size(path) for path, _, _ in local_files(paths))
    refused: Counter[str] = Counter()
    licences: Counter[str] = Counter()
    passed_over: Counter[str] = Counter()
    skipped_files: list[str] = []
    text_bytes = 0

    def on_skipped(origin: str) -> None:
        passed_over[os.path.splitext(origin)[1].lower() or os.path.basename(origin)] += 1
        if len(skipped_files) < _SKIPPED_SHOWN:
            skipped_files.append(origin)

    source = SOURCES[slug].prepared(total_bytes)
    with ExitStack() as stack:
        bar = stack.enter_context(progress(f"extract {slug}", total=total_bytes or None, unit="bytes"))
        pool = stack.enter_context(WorkerPool(workers, extract_batch))
        shard = stack.enter_context(ShardFileWriter(out, threads=workers))
        rejected = stack.enter_context(ShardFileWriter(rejects)) if rejects is not None else None
        results = _results(pool, source, paths, total_bytes, bar.advance, on_skipped)
        for lines, refusals, found_licences, found_bytes in results:
            for line in lines:
                shard.write_line(line)
            for refusal in refusals:
                refused[refusal.reason] += 1
                if rejected is not None:
                    rejected.write_line(refusal_line(refusal))
            licences += found_licences
            text_bytes += found_bytes
            bar.note(f"{sum(licences.values())} documents, {sum(refused.values())} refused")
        if not licences:
            reasons = ", ".join(f"{count} {reason}" for reason, count in refused.most_common(3)) or "no matching file"
            fix = f"give what it reads: {source.raw_format}"
            if passed_over:
                reasons += f"; skipped by name {describe_skipped(passed_over, skipped_files)}"
                fix += "; or give a skipped file by its path"
            raise PiledriverError(f"no {slug} document in {', '.join(paths)} ({reasons})", fix=fix)
    summary = shard.summary
    return ExtractSummary(
        source=slug,
        out=str(out),
        documents=summary.documents,
        text_bytes=text_bytes,
        compressed_bytes=summary.compressed_bytes,
        sha256=summary.sha256,
        refused=dict(refused.most_common()),
        licences=dict(licences.most_common()),
        passed_over=dict(passed_over.most_common()),
        skipped_files=skipped_files,
    )


def describe_skipped(counts: Mapping[str, int], names: Sequence[str]) -> str:
    """Return the number of skipped files by suffix, and the first names.

    >>> describe_skipped({".bz2": 2}, ["raw/a.bz2", "raw/b.bz2"])
    '2 .bz2: raw/a.bz2, raw/b.bz2'
    """
    more = sum(counts.values()) - len(names)
    kinds = ", ".join(f"{count} {suffix}" for suffix, count in counts.items())
    return f"{kinds}: {', '.join(names)}" + (f" and {more} more" if more else "")


def extract_files(source: Source, paths: Sequence[str], on_bytes: OnBytes | None = None) -> Iterator[Found]:
    """Yield the documents and refusals of a source in order, parsed in this process."""
    for piece in find_pieces(source, paths, on_bytes):
        if isinstance(piece, Refusal):
            yield piece
        else:
            yield from extract_piece(source, piece)


def find_pieces(
    source: Source, paths: Sequence[str], on_bytes: OnBytes | None = None, on_skipped: OnSkipped | None = None
) -> Iterator[Piece | Refusal]:
    """Yield the pieces of the raw files, and a refusal for each file that cannot be opened."""
    aside: list[Refusal] = []
    # The origin of the file being read; `None` while the next one is opened.
    reading: str | None = None

    def streams() -> Iterator[RawStream]:
        nonlocal reading
        for item in raw_streams(paths, source.wants, on_bytes, on_skipped):
            if isinstance(item, Refusal):
                aside.append(item)
            else:
                reading = item.origin
                yield item
                reading = None

    opened = streams()
    while True:
        try:
            for piece in source.pieces(opened):
                yield from aside
                aside.clear()
                yield piece
            break
        except Exception as error:
            if reading is None:
                raise
            # The source loses its state of earlier files; later files are read as if they were the only ones.
            yield _refusal(reading, error, source, "damaged data" if isinstance(error, DAMAGE) else None)
    yield from aside


def extract_piece(source: Source, piece: Piece) -> Iterator[Found]:
    """Yield the finished documents of one piece; any error becomes a refusal."""
    try:
        for item in source.documents(piece):
            yield _finished(source, item, piece) if isinstance(item, Document) else item
    except Exception as error:
        yield _refusal(piece.origin, error, source)


_Result = tuple[list[bytes], list[Refusal], Counter[str], int]


def extract_batch(task: tuple[str, list[Piece | Refusal], int]) -> _Result:
    """Parse a batch of pieces in a worker; return encoded lines, refusals, licence counts and bytes of text."""
    slug, pieces, total_bytes = task
    source = SOURCES[slug].prepared(total_bytes)
    lines: list[bytes] = []
    refusals: list[Refusal] = []
    licences: Counter[str] = Counter()
    text_bytes = 0
    signal.signal(signal.SIGALRM, _time_out)
    for piece in pieces:
        if isinstance(piece, Refusal):
            refusals.append(piece)
            continue
        signal.setitimer(signal.ITIMER_REAL, _PIECE_SECONDS)
        for item in extract_piece(source, piece):
            if isinstance(item, Refusal):
                refusals.append(item)
                continue
            lines.append(to_line(item))
            licences[str(item.meta.get("licence", ""))] += 1
            text_bytes += len(item.text.encode("utf-8", "replace"))
        signal.setitimer(signal.ITIMER_REAL, 0)
    return lines, refusals, licences, text_bytes


def _results(
    pool: WorkerPool, source: Source, paths: Sequence[str], total_bytes: int, on_bytes: OnBytes, on_skipped: OnSkipped
) -> Iterator[_Result]:
    """Yield the results of batches of pieces; a batch that crashed its worker is retried piece by piece."""
    pieces = find_pieces(source, paths, on_bytes, on_skipped)
    batches = batches_by_size(pieces, piece_bytes, _BATCH_BYTES, _BATCH_PIECES)
    tasks = ((source.slug, batch, total_bytes) for batch in batches)
    for result in pool.map(tasks):
        if isinstance(result, FailedTask):
            yield from _retried(source, result.task[1], total_bytes)
        else:
            yield result


def _retried(source: Source, batch: list[Piece | Refusal], total_bytes: int) -> Iterator[_Result]:
    with WorkerPool(1, extract_batch, task_seconds=2 * _PIECE_SECONDS) as pool:
        for item, result in zip(batch, pool.map((source.slug, [item], total_bytes) for item in batch), strict=True):
            if isinstance(result, FailedTask):
                refusal = Refusal("parser crashed", item.origin, result.why, source.name)
                yield [], [refusal], Counter(), 0
            else:
                yield result


def _finished(source: Source, draft: Document, piece: Piece) -> Found:
    """Return the document with normalised text, source name, licence and id, or the refusal of an empty one."""
    text = normalise(draft.text) if source.text_kind == "prose" else normalise_code(draft.text)
    meta = dict(draft.meta)
    origin = str(meta.pop("origin", piece.origin))
    if not text.strip():
        return Refusal("empty text", origin, source=source.name)
    licence = meta.pop("licence", None) or source.licence
    return make_document(text, source=source.name, origin=origin, licence=licence, **meta)


_BROKEN = (zlib.error, lzma.LZMAError, zstandard.ZstdError, tarfile.TarError, zipfile.BadZipFile)
_REASONS: tuple[tuple[tuple[type[BaseException], ...], str], ...] = (
    ((TimeoutError,), "timed out"),
    ((MemoryError,), "out of memory"),
    ((RecursionError,), "nested too deeply"),
    ((UnicodeError,), "undecodable text"),
    ((*_BROKEN, EOFError, OSError, PiledriverError), "damaged data"),
    ((SyntaxError,), "invalid markup"),  # includes lxml's errors
    ((ValueError, KeyError, IndexError), "malformed record"),
)


def _refusal(origin: str, error: Exception, source: Source, reason: str | None = None) -> Refusal:
    """Return the refusal of content that raised; a `RejectedError` has its own reason."""
    reason = reason or next((reason for kinds, reason in _REASONS if isinstance(error, kinds)), "parser failed")
    return msgspec.structs.replace(damage_refusal(origin, error, reason), source=source.name)


def _time_out(*_: object) -> None:
    raise TimeoutError(f"more than {_PIECE_SECONDS} s")
