"""What the tasks do: each function fills one folder from others, and nothing but its arguments decides what it writes.

They run in any process on any machine that sees the work folder. The stages (stages.py) say which tasks there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import xxhash

from piledriver.core import storage
from piledriver.core.config import from_mapping
from piledriver.core.errors import PiledriverError
from piledriver.corpus.assembly.chunks import DOCUMENTS, IDS, Dropped, write_chunk
from piledriver.corpus.assembly.tasks import task_folder, work_of
from piledriver.corpus.dedup import clusters, near
from piledriver.corpus.dedup.arrays import ArrayFile, write_arrays
from piledriver.corpus.dedup.minhash import MinHashSettings
from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.extract import found_in_piece
from piledriver.corpus.filters import Drop, Filter
from piledriver.corpus.shard_reader import read_shards, read_texts
from piledriver.corpus.source import Piece
from piledriver.corpus.sources import resolve
from piledriver.corpus.uses import by_path, stage_settings

ARRAYS = "arrays"


def checksums(folder: str, files: list[Any], payload: list[str]) -> dict[str, Any]:
    """The checksums of some raw files; `files` are their origins, sizes and times, `payload` their paths here."""
    return {"sha256": [storage.sha256(path) for path in payload]}


def extract_chunk(
    folder: str, source: str, name: str, inputs: str, number: int, payload: list[Piece | Refusal]
) -> dict[str, Any]:
    """Some pieces of a source to documents; what the source refuses goes to the ledger."""
    opened = resolve(source)

    def found() -> Iterator[Document | Dropped]:
        for piece in payload:
            for item in [piece] if isinstance(piece, Refusal) else found_in_piece(opened, piece):
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
        for document in documents_of(folder, chunk):
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
    pairs = np.array([_text_hash(document.text) for document in documents_of(folder, chunk)], np.uint64).reshape(-1, 2)
    order = np.argsort(pairs[:, 0], kind="stable")
    write_arrays(
        os.path.join(folder, ARRAYS),
        hashes=np.ascontiguousarray(pairs[order, 0][None]),
        checks=np.ascontiguousarray(pairs[order, 1][None]),
        documents=order.astype(np.uint32)[None],
    )
    return {"documents": len(pairs)}


def _text_hash(text: str) -> tuple[int, int]:
    # Case, punctuation and spacing at the ends do not make another document.
    normalised = " ".join(text.lower().split()).encode("utf-8", "replace")
    value = xxhash.xxh3_128_intdigest(normalised)
    return value & 0xFFFFFFFFFFFFFFFF, value >> 64


def exact_edges(folder: str, runs: list[list[Any]], low: int, high: int) -> dict[str, Any]:
    """Documents with equal hashes in one range, each tied to the first of its kind."""
    values, checks, ordinals = [], [], []
    for run in runs_of(folder, runs):
        file = ArrayFile(run.path)
        begin, end = file.searchsorted("hashes", 0, low), file.searchsorted("hashes", 0, high)
        values.append(file.slice("hashes", 0, begin, end))
        checks.append(file.slice("checks", 0, begin, end))
        ordinals.append(file.slice("documents", 0, begin, end).astype(np.uint64) + np.uint64(run.first))
    value, check, ordinal = np.concatenate(values), np.concatenate(checks), np.concatenate(ordinals)
    order = np.lexsort((ordinal, check, value))
    value, check, ordinal = value[order], check[order], ordinal[order]
    same = (value[1:] == value[:-1]) & (check[1:] == check[:-1])
    edges = np.stack([ordinal[:-1][same], ordinal[1:][same]], axis=1)
    write_arrays(os.path.join(folder, ARRAYS), edges=edges)
    return {"edges": len(edges)}


def near_signatures(folder: str, chunk: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Step 1 of near.py."""
    texts = read_texts(os.path.join(task_folder(work_of(folder), chunk), DOCUMENTS))
    return {"documents": near.sign_run(texts, _minhash(settings), os.path.join(folder, ARRAYS))}


def near_pairs(folder: str, runs: list[list[Any]], band: int, low: int, high: int) -> dict[str, Any]:
    """Step 2 of near.py."""
    return {"pairs": near.meet(runs_of(folder, runs), band, (low, high), os.path.join(folder, ARRAYS))}


def near_edges(
    folder: str, runs: list[list[Any]], pairs: list[str], low: int, high: int, threshold: float
) -> dict[str, Any]:
    """Step 3 of near.py."""
    candidates = [arrays_of(folder, key) for key in pairs]
    count = near.compare(runs_of(folder, runs), candidates, low, high, threshold, os.path.join(folder, ARRAYS))
    return {"edges": count}


def label_clusters(folder: str, edges: list[str], documents: int) -> dict[str, Any]:
    """Edges to clusters, over the whole corpus."""
    members = clusters.label([arrays_of(folder, key) for key in edges], documents, os.path.join(folder, ARRAYS))
    return {"members": members}


def drop_duplicates(
    folder: str, chunk: str, first: int, labels: str, chunks: list[list[Any]], stage: str
) -> dict[str, Any]:
    """One chunk without the documents that are not the first of their cluster; the ledger says which was kept."""
    documents = list(documents_of(folder, chunk))
    members, firsts = cluster_members(arrays_of(folder, labels), first, len(documents))
    gone = {member: kept for member, kept in zip(members, firsts, strict=True) if member != kept}
    kept_ids = _ids(folder, chunks, sorted(set(gone.values())))

    def kept() -> Iterator[Document | Dropped]:
        for ordinal, document in enumerate(documents, first):
            if ordinal in gone:
                kept_id = kept_ids[gone[ordinal]]
                yield Dropped(document.id, document.source, stage, f"{stage} duplicate", kept=kept_id)
            else:
                yield document

    return write_chunk(folder, kept())


def cluster_members(labels: str, first: int, count: int) -> tuple[list[int], list[int]]:
    """(member, first of its cluster) of the documents with ordinals from `first` on."""
    file = ArrayFile(labels)
    low, high = (file.position("members", edge) for edge in (first, first + count))
    return file.rows("members", low, high).tolist(), file.rows("firsts", low, high).tolist()


def _ids(folder: str, chunks: list[list[Any]], ordinals: list[int]) -> dict[int, str]:
    """The ids of some documents by their ordinals, which are sorted; chunks are (key, first ordinal, count)."""
    found: dict[int, str] = {}
    wanted = np.array(ordinals, np.int64)
    for key, first, count in chunks:
        low, high = np.searchsorted(wanted, [first, first + count]).tolist()
        if low < high:
            file = ArrayFile(os.path.join(task_folder(work_of(folder), key), IDS))
            ids = file.take("ids", wanted[low:high] - first).tolist()
            found.update(zip(ordinals[low:high], (name.decode() for name in ids), strict=True))
    return found


def _minhash(settings: dict[str, Any]) -> MinHashSettings:
    return from_mapping(MinHashSettings, settings, "near")


def documents_of(folder: str, chunk: str) -> Iterator[Document]:
    """The documents of a chunk, from inside a task."""
    path = os.path.join(task_folder(work_of(folder), chunk), DOCUMENTS)
    if not os.path.exists(path):
        raise PiledriverError(f"{path} is missing", fix="run the build again")
    return read_shards(path)


def arrays_of(folder: str, key: str) -> str:
    """The array file of another task."""
    return os.path.join(task_folder(work_of(folder), key), ARRAYS)


def runs_of(folder: str, runs: list[list[Any]]) -> list[near.Run]:
    """Runs by the keys of the tasks that made them."""
    return [near.Run(arrays_of(folder, key), first, count) for key, first, count in runs]
