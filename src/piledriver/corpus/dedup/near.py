"""Near-duplicates in a fixed amount of memory, whatever the size of the corpus: sorted runs on disk, then merges of
ranges.

Four steps, each a pure function from files to one file, so that any executor can run them in any order and again after
a crash:

1. `sign_run` (a chunk of documents): signatures, and the hashes of each band in sorted order with the number of their
document. 2. `meet` (one band, one range of hashes): documents whose hashes are equal, as candidate pairs. 3. `compare`
(one range of documents): candidate pairs once each, with the similarity of their signatures; those over the threshold
are edges. 4. `clusters` (see clusters.py): connected documents get the number of the first of them.

A document is known by its ordinal: its position in the whole sequence of chunks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from piledriver.core import storage
from piledriver.corpus.dedup.arrays import ArrayFile, write_arrays
from piledriver.corpus.dedup.minhash import MinHashSettings, Signer

UInt64Array = npt.NDArray[np.uint64]
_COMPARED_AT_ONCE = 1 << 17


@dataclass(frozen=True)
class Run:
    """One signed chunk: its file, the ordinal of its first document and how many it has."""

    path: str
    first: int
    count: int


def sign_run(texts: Iterable[str], settings: MinHashSettings, path: storage.Location) -> int:
    """Sign a chunk of documents into a run file; returns how many there were."""
    signer = Signer(settings)
    signatures = [signer(text) for text in texts]
    count = len(signatures)
    stacked = np.stack(signatures) if count else np.empty((0, settings.permutations), np.uint32)
    bands = (
        np.stack([signer.bands(signature) for signature in signatures])
        if count
        else np.empty((0, settings.bands), np.uint64)
    )
    order = np.argsort(bands, axis=0, kind="stable")
    write_arrays(
        path,
        # Sixteen bits of each value are enough to compare: unequal values agree in them once in 65,536.
        signatures=(stacked & np.uint32(0xFFFF)).astype(np.uint16),
        hashes=np.ascontiguousarray(np.take_along_axis(bands, order, axis=0).T),
        documents=np.ascontiguousarray(order.T.astype(np.uint32)),
    )
    return count


def hash_ranges(documents: int, memory_bytes: int) -> list[tuple[int, int]]:
    """Ranges of band hashes, each with few enough entries for `meet` to hold."""
    # An entry is a hash, an ordinal, and their copies while sorting.
    count = max(1, -(-documents * 64 // memory_bytes))
    edges = [(i << 64) // count for i in range(count + 1)]
    return list(pairwise(edges))


def meet(runs: Sequence[Run], band: int, hashes: tuple[int, int], path: storage.Location) -> int:
    """Candidate pairs of one band in one range of hashes; returns how many.

    In a bucket of equal hashes each document is paired with the one before it and with the first, so that a bucket of a
    million costs two million pairs, not half a trillion.
    """
    found_hashes, found_ordinals = [], []
    for run in runs:
        file = ArrayFile(run.path)
        low = file.searchsorted("hashes", band, hashes[0])
        high = file.searchsorted("hashes", band, hashes[1])
        found_hashes.append(file.slice("hashes", band, low, high))
        found_ordinals.append(file.slice("documents", band, low, high).astype(np.uint64) + np.uint64(run.first))
    values, ordinals = np.concatenate(found_hashes), np.concatenate(found_ordinals)
    order = np.argsort(values, kind="stable")
    values, ordinals = values[order], ordinals[order]
    same = values[1:] == values[:-1]
    later = np.flatnonzero(same) + 1
    # The first of each bucket: walk back from every later member to where its run of equal hashes began.
    begins = (
        np.maximum.accumulate(np.where(np.concatenate([[True], ~same]), np.arange(len(values)), 0))
        if len(values)
        else later
    )
    pairs = np.concatenate(
        [
            np.stack([ordinals[later - 1], ordinals[later]], axis=1),
            np.stack([ordinals[begins[later]], ordinals[later]], axis=1),
        ]
    )
    pairs = np.unique(pairs, axis=0)
    write_arrays(path, pairs=pairs)
    return len(pairs)


def compare(
    runs: Sequence[Run], candidates: Sequence[str], first: int, end: int, threshold: float, path: storage.Location
) -> int:
    """Edges among the candidate pairs whose earlier document is in [first, end); returns how many.

    Candidates are sorted by their earlier document, so that each file gives a range.
    """
    parts = []
    for candidate in candidates:
        file = ArrayFile(candidate)
        low, high = (file.searchsorted_rows("pairs", edge) for edge in (first, end))
        parts.append(file.rows("pairs", low, high))
    pairs = np.unique(np.concatenate(parts), axis=0) if parts else np.empty((0, 2), np.uint64)
    kept, similarities = [], []
    for at in range(0, len(pairs), _COMPARED_AT_ONCE):
        block = pairs[at : at + _COMPARED_AT_ONCE]
        estimate = (_signatures(runs, block[:, 0]) == _signatures(runs, block[:, 1])).mean(axis=1)
        duplicate = estimate >= threshold
        kept.append(block[duplicate])
        similarities.append(estimate[duplicate].astype(np.float32))
    edges = np.concatenate(kept) if kept else np.empty((0, 2), np.uint64)
    similarity = np.concatenate(similarities) if similarities else np.empty(0, np.float32)
    write_arrays(path, edges=edges, similarity=similarity)
    return len(edges)


def _signatures(runs: Sequence[Run], ordinals: UInt64Array) -> npt.NDArray[np.uint16]:
    """The signatures of some documents, read run by run."""
    firsts = np.array([run.first for run in runs], np.uint64)
    owner = np.searchsorted(firsts, ordinals, side="right") - 1
    order = np.argsort(ordinals, kind="stable")
    pieces = []
    at = 0
    while at < len(order):
        run = int(owner[order[at]])
        end = at + int(np.searchsorted(owner[order[at:]], run, side="right"))
        local = ordinals[order[at:end]] - np.uint64(runs[run].first)
        pieces.append(ArrayFile(runs[run].path).take("signatures", local))
        at = end
    gathered = np.concatenate(pieces)
    restored = np.empty_like(gathered)
    restored[order] = gathered
    return restored
