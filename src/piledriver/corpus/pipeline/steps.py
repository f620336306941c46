"""What the tasks do: each function fills one folder from others, and nothing but its arguments decides what it writes.

They run in any process on any machine that sees the work folder. The stages (stages.py) say which tasks there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from piledriver.core import storage
from piledriver.core.config import from_mapping
from piledriver.corpus.dedup import clusters, near
from piledriver.corpus.dedup.arrays import ArrayFile, write_arrays
from piledriver.corpus.dedup.minhash import MinHashSettings
from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.extract import extract_piece
from piledriver.corpus.filters import Drop, Filter
from piledriver.corpus.pipeline import chunk_index
from piledriver.corpus.pipeline.catalogue import ARRAYS, Catalogue
from piledriver.corpus.pipeline.chunks import (
    DOCUMENTS,
    DROPPED,
    LEVEL,
    Dropped,
    chunk_documents,
    chunk_lines,
    write_chunk,
)
from piledriver.corpus.pipeline.stage_settings import by_path, stage_settings
from piledriver.corpus.pipeline.tasks import task_folder, work_of
from piledriver.corpus.shards.writer import ShardFileWriter
from piledriver.corpus.sources import resolve
from piledriver.corpus.sources.base import Piece, piece_bytes


class _Text(msgspec.Struct, gc=False):
    """What of a line is hashed."""

    text: str


class _Named(msgspec.Struct, gc=False):
    """What of a line the ledger needs."""

    meta: dict[str, Any]


UInt64Array = npt.NDArray[np.uint64]
_text = msgspec.json.Decoder(_Text)
_named = msgspec.json.Decoder(_Named)


def checksums(folder: str, files: list[Any], payload: list[str]) -> dict[str, Any]:
    """The checksums of some raw files; `files` are their origins, sizes and times, `payload` their paths here."""
    return {"sha256": [storage.sha256(path) for path in payload]}


def extract_chunk(
    folder: str, source: str, name: str, inputs: str, number: int, payload: list[Piece | Refusal]
) -> dict[str, Any]:
    """Some pieces of a source to documents; what the source refuses goes to the ledger."""
    # By the size of this chunk alone, so that the task depends on no other.
    opened = resolve(source).prepared(sum(map(piece_bytes, payload)))

    def found() -> Iterator[Document | Dropped]:
        for piece in payload:
            for item in [piece] if isinstance(piece, Refusal) else extract_piece(opened, piece):
                if isinstance(item, Refusal):
                    yield Dropped("", name, "extract", item.reason, item.detail, origin=item.origin)
                else:
                    yield Document(item.text, item.id, name, item.meta)

    return write_chunk(folder, found())


def filter_chunk(
    folder: str,
    chunk: str,
    filters: list[dict[str, Any]],
    allow: list[str],
    refuse: list[str],
    payload: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Licences, then some filters in order, over one chunk; `payload` has the places of files by their checksums."""
    judges = [
        (entry["use"], stage_settings(entry["use"], by_path(entry["use"], entry["settings"], payload)))
        for entry in filters
    ]

    def judged() -> Iterator[Document | Dropped]:
        for document in chunk_documents(work_of(folder), chunk):
            licence = str(document.meta.get("licence", "unknown"))
            if not licence_allowed(licence, allow, refuse):
                yield Dropped(document.id, document.source, "licence", "licence not allowed", licence)
            else:
                yield _judged(document, judges)

    return write_chunk(folder, judged())


def _judged(document: Document, judges: list[tuple[str, Filter]]) -> Document | Dropped:
    kept = document
    for use, judge in judges:
        verdict = judge(kept)
        if isinstance(verdict, Drop):
            return Dropped(document.id, document.source, use, verdict.reason, verdict.detail)
        kept = verdict
    return kept


def licence_allowed(licence: str, allow: list[str], refuse: list[str]) -> bool:
    """Whether a licence fits patterns: some allowed (or none given), and none refused.

    >>> licence_allowed("CC-BY-4.0", ["CC-BY-*", "CC0-*"], ["CC-BY-NC*"])
    True
    """

    def fits(patterns: list[str]) -> bool:
        return any(fnmatchcase(licence.lower(), pattern.lower()) for pattern in patterns)

    return (not allow or fits(allow)) and not fits(refuse)


def exact_hashes(folder: str, chunk: str) -> dict[str, Any]:
    """Two independent 64-bit hashes of each normalised text, in the order of the first."""
    pairs = np.array([_text_hash(text) for text in texts_of(folder, chunk)], np.uint64).reshape(-1, 2)
    order = np.argsort(pairs[:, 0], kind="stable")
    write_arrays(
        os.path.join(folder, ARRAYS),
        hashes=pairs[order, 0],
        checks=pairs[order, 1],
        documents=order.astype(np.uint64),
    )
    return {"documents": len(pairs)}


def _text_hash(text: str) -> tuple[int, int]:
    # Case, punctuation and spacing at the ends do not make another document.
    normalised = " ".join(text.lower().split()).encode("utf-8", "replace")
    value = xxhash.xxh3_128_intdigest(normalised)
    return value & 0xFFFFFFFFFFFFFFFF, value >> 64


def exact_edges(folder: str, runs: str, low: int, high: int) -> dict[str, Any]:
    """Documents with equal hashes in one range, each tied to the one before it."""
    earlier, later = repeated(folder, runs, low, high)
    write_arrays(os.path.join(folder, ARRAYS), edges=np.stack([earlier, later], axis=1))
    return {"edges": len(later)}


def repeated(folder: str, runs: str, low: int, high: int) -> tuple[UInt64Array, UInt64Array]:
    """(ordinal of the one before, ordinal) of what has the same two hashes as something before it, in one range."""
    values, checks, ordinals = ([np.empty(0, np.uint64)] for _ in range(3))
    for run in Catalogue(work_of(folder), runs).runs():
        file = ArrayFile(run.path)
        begin, end = file.position("hashes", low), file.position("hashes", high)
        values.append(file.rows("hashes", begin, end))
        checks.append(file.rows("checks", begin, end))
        ordinals.append(file.rows("documents", begin, end) + np.uint64(run.first))
    value, check, ordinal = np.concatenate(values), np.concatenate(checks), np.concatenate(ordinals)
    order = np.lexsort((ordinal, check, value))
    value, check, ordinal = value[order], check[order], ordinal[order]
    same = (value[1:] == value[:-1]) & (check[1:] == check[:-1])
    return ordinal[:-1][same], ordinal[1:][same]


def near_signatures(folder: str, chunk: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Step 1 of near.py."""
    return {"documents": near.sign_run(texts_of(folder, chunk), _minhash(settings), os.path.join(folder, ARRAYS))}


def near_bands(folder: str, runs: str, low: int, high: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Step 2 of near.py, over the runs [low, high)."""
    group = list(Catalogue(work_of(folder), runs).runs(low, high))
    return {"documents": near.band_group(group, _minhash(settings), os.path.join(folder, ARRAYS))}


def near_pairs(folder: str, groups: str, band: int, low: int, high: int) -> dict[str, Any]:
    """Step 3 of near.py."""
    listed = Catalogue(work_of(folder), groups).runs()
    return {"pairs": near.meet(listed, band, (low, high), os.path.join(folder, ARRAYS))}


def near_edges(
    folder: str, runs: str, groups: str, pairs: str, low: int, high: int, threshold: float
) -> dict[str, Any]:
    """Step 4 of near.py, over the groups [low, high)."""
    work = work_of(folder)
    candidates = [run.path for run in Catalogue(work, pairs).runs()]
    chosen = list(Catalogue(work, groups).runs(low, high))
    signed = Catalogue(work, runs).by_number()
    return {"edges": near.compare(signed, chosen, candidates, threshold, os.path.join(folder, ARRAYS))}


def label_clusters(folder: str, edges: str, documents: int) -> dict[str, Any]:
    """Edges to clusters, over the whole corpus."""
    files = (run.path for run in Catalogue(work_of(folder), edges).runs())
    return {"members": clusters.label(files, documents, os.path.join(folder, ARRAYS))}


def drop_duplicates(
    folder: str,
    chunk: str,
    first: int,
    count: int,
    labels: str,
    chunks: str,
    stage: str,
    signatures: str | None = None,
    level: int = LEVEL,
) -> dict[str, Any]:
    """One chunk without the documents that are not the first of their cluster; the ledger says which was kept.

    What stays is copied line by line as it is written; only what goes is parsed.
    """
    work = work_of(folder)
    rows = cluster_rows(arrays_of(folder, labels), first, count)
    rows = rows[rows[:, 0] != rows[:, 1]]
    gone = np.zeros(count, np.bool_)
    gone[(rows[:, 0] - np.uint64(first)).astype(np.int64)] = True
    kept_ids = ids_of(work, Catalogue(work, chunks), rows[:, 1])
    details = [""] * len(rows)
    if signatures is not None:
        agreeing = near.agreement(Catalogue(work, signatures).by_number(), rows)
        details = [f"similarity about {share:.2f}" for share in agreeing.tolist()]
    with (
        ShardFileWriter(os.path.join(folder, DOCUMENTS), level=level) as shard,
        ShardFileWriter(os.path.join(folder, DROPPED), level=LEVEL) as ledger,
    ):
        reasons = iter(zip(kept_ids, details, strict=True))
        for line, goes in zip(chunk_lines(work, chunk), gone.tolist(), strict=True):
            if not goes:
                shard.write_line(line)
                continue
            kept, detail = next(reasons)
            meta = _named.decode(line).meta
            entry = Dropped(meta["id"], meta["pile_set_name"], stage, f"{stage} duplicate", detail, kept)
            ledger.write_line(msgspec.json.encode(entry) + b"\n")
    dropped = {f"{stage}: {stage} duplicate": len(rows)} if len(rows) else {}
    return {"dropped": dropped, **chunk_index.write_without(folder, task_folder(work, chunk), gone)}


def cluster_rows(labels: str, first: int, count: int) -> UInt64Array:
    """Rows (member, first of its cluster) of the documents with ordinals from `first` on."""
    file = ArrayFile(labels)
    low, high = (file.row_position("clusters", edge) for edge in (first, first + count))
    return file.rows("clusters", low, high)


def ids_of(work: str, chunks: Catalogue, ordinals: UInt64Array) -> list[str]:
    """The ids of some documents by their ordinals; each chunk is opened once."""
    wanted, places = np.unique(ordinals, return_inverse=True)
    owners = chunks.owners(wanted)
    found: list[str] = []
    for owner in np.unique(owners).tolist():
        inside = (wanted[owners == owner] - np.uint64(chunks.first(owner))).astype(np.int64)
        found += chunk_index.ids(task_folder(work, chunks.key(owner)), inside)
    return [found[place] for place in places.tolist()]


def _minhash(settings: dict[str, Any]) -> MinHashSettings:
    return from_mapping(MinHashSettings, settings, "near")


def texts_of(folder: str, chunk: str) -> Iterator[str]:
    """The texts of a chunk, from inside a task."""
    return (_text.decode(line).text for line in chunk_lines(work_of(folder), chunk))


def arrays_of(folder: str, key: str) -> str:
    """The array file of another task."""
    return os.path.join(task_folder(work_of(folder), key), ARRAYS)
