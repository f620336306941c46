"""Near-duplicates in a fixed amount of memory, whatever the size of the corpus: sorted runs on disk, then merges of
ranges.

Five steps, each a pure function from files to one file, so that any executor can run them in any order and again after
a crash:

1. `sign_run` (a chunk of documents): their signatures.
2. `band_group` (a group of runs, some 10^5 documents): the hashes of each band in sorted order, and the pairs that meet
   inside the group. Of the documents with one hash only the first and the last go on, so that a bucket of a billion
   is as many numbers as there are groups, twice.
3. `meet` (one band, one range of hashes): documents of different groups whose hashes are equal, as candidate pairs.
4. `compare` (some groups): candidate pairs once each, by their signatures; those over the threshold are edges.
5. `clusters` (see clusters.py): connected documents get the number of the first of them.

A document is known by its ordinal: its position in the whole sequence of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numba
import numpy as np
import numpy.typing as npt

from piledriver.core import storage
from piledriver.corpus.dedup.arrays import ArrayFile, growing_array, write_arrays
from piledriver.corpus.dedup.minhash import MinHashSettings, Signer, band_hashes

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]
UInt16Array = npt.NDArray[np.uint16]
UInt64Array = npt.NDArray[np.uint64]
# Pairs that `compare` holds at a time: 16 bytes each, and some copies while they are sorted.
_PAIRS_AT_ONCE = 1 << 21
_COMPARED_AT_ONCE = 1 << 16
_NO_PAIRS = np.empty((0, 2), np.uint64)


@dataclass(frozen=True)
class Run:
    """One signed chunk, or a group of them: its file, the ordinal of its first document and how many it has."""

    path: str
    first: int
    count: int


@dataclass(frozen=True)
class Runs:
    """Signed chunks by their numbers: where each begins, and the path of each."""

    firsts: UInt64Array
    path: Callable[[int], str]


def sign_run(texts: Iterable[str], settings: MinHashSettings, path: storage.Location) -> int:
    """Sign a chunk of documents into a run file; returns how many there were."""
    signer = Signer(settings)
    signatures = [signer(text) for text in texts]
    stacked = np.stack(signatures) if signatures else np.empty((0, settings.permutations), np.uint16)
    write_arrays(path, signatures=stacked)
    return len(signatures)


def band_group(runs: Sequence[Run], settings: MinHashSettings, path: storage.Location) -> int:
    """Sort the bands of some runs that follow each other; returns how many documents they have.

    `pairs` are those that met inside, as (earlier << 32 | later) from the beginning of the group, sorted.
    """
    signatures = np.concatenate([ArrayFile(run.path).whole("signatures") for run in runs])
    hashes, documents, pairs, ends = [], [], [np.empty(0, np.uint64)], [0]
    for band in range(settings.bands):
        values = band_hashes(signatures, band, settings.rows)
        order = np.argsort(values, kind="stable").astype(np.uint64)
        values = values[order]
        begins, later = _buckets(values)
        earlier = _paired(order, begins, later)
        pairs.append(np.unique((earlier[:, 0] << np.uint64(32)) | earlier[:, 1]))
        lasts = np.concatenate([begins[1:], [len(values)]]) - 1 if len(begins) else begins
        ends_of_buckets = np.union1d(begins, lasts)
        hashes.append(values[ends_of_buckets])
        documents.append(order[ends_of_buckets].astype(np.uint32))
        ends.append(ends[-1] + len(ends_of_buckets))
    write_arrays(
        path,
        ends=np.array(ends, np.int64),
        hashes=np.concatenate(hashes),
        documents=np.concatenate(documents),
        pairs=np.unique(np.concatenate(pairs)),
    )
    return len(signatures)


def hash_ranges(documents: int, memory_bytes: int) -> list[tuple[int, int]]:
    """Ranges of hashes, each with few enough entries to be held and sorted."""
    # An entry is a hash, an ordinal, and their copies while sorting.
    count = max(1, -(-documents * 64 // memory_bytes))
    edges = [(i << 64) // count for i in range(count + 1)]
    return list(pairwise(edges))


def meet(groups: Iterable[Run], band: int, hashes: tuple[int, int], path: storage.Location) -> int:
    """Candidate pairs between groups of one band in one range of hashes, by their earlier document; returns how many.

    In a bucket of equal hashes each document is paired with the one before it and with the first, so that a bucket of
    n costs 2 n pairs, not n squared.
    """
    found_hashes, found_ordinals = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for group in groups:
        file = ArrayFile(group.path)
        begin, end = file.rows("ends", band, band + 2).tolist()
        low, high = (file.position("hashes", edge, begin, end) for edge in hashes)
        found_hashes.append(file.rows("hashes", low, high))
        found_ordinals.append(file.rows("documents", low, high).astype(np.uint64) + np.uint64(group.first))
    values, ordinals = np.concatenate(found_hashes), np.concatenate(found_ordinals)
    found_hashes.clear()
    found_ordinals.clear()
    # Groups come in the order of the corpus, so a stable sort leaves equal hashes in the order of their documents.
    order = np.argsort(values, kind="stable")
    values, ordinals = values[order], ordinals[order]
    del order
    pairs = _paired(ordinals, *_buckets(values))
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    write_arrays(path, pairs=pairs)
    return len(pairs)


def _buckets(values: UInt64Array) -> tuple[Int64Array, Int64Array]:
    """(where each bucket of equal values begins, the places that are not a beginning) of sorted values."""
    new = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return np.flatnonzero(new), np.flatnonzero(~new)


def _paired(ordinals: UInt64Array, begins: Int64Array, later: Int64Array) -> UInt64Array:
    """Each later member of a bucket with the one before it and, where that is another, with the bucket's first."""
    if not len(later):
        return _NO_PAIRS
    first = begins[np.searchsorted(begins, later, side="right") - 1]
    far = first != later - 1
    earlier = np.concatenate([later - 1, first[far]])
    return np.stack([ordinals[earlier], ordinals[np.concatenate([later, later[far]])]], axis=1)


def compare(
    runs: Runs, groups: Sequence[Run], candidates: Sequence[str], threshold: float, path: storage.Location
) -> int:
    """Edges among the candidate pairs whose earlier document is in one of some groups; returns how many."""
    files = [ArrayFile(candidate) for candidate in candidates]
    count = 0
    with growing_array(path, "edges", _NO_PAIRS) as append:
        for group in groups:
            for pairs in _candidates(group, files, group.first, group.first + group.count):
                for at in range(0, len(pairs), _COMPARED_AT_ONCE):
                    block = pairs[at : at + _COMPARED_AT_ONCE]
                    edges = block[similar(runs, block, threshold)]
                    count += len(edges)
                    append(edges)
    return count


def similar(runs: Runs, pairs: UInt64Array, threshold: float) -> BoolArray:
    """Which pairs of documents have signatures that agree in at least this share."""
    return agreement(runs, pairs) >= threshold


def agreement(runs: Runs, pairs: UInt64Array) -> npt.NDArray[np.float64]:
    """The share of hash values in which the signatures of each pair agree: their estimated Jaccard similarity."""
    if not len(pairs):
        return np.empty(0)
    ordinals, places = np.unique(pairs, return_inverse=True)
    signatures = _signatures(runs, ordinals)
    places = places.reshape(pairs.shape)
    shares: npt.NDArray[np.float64] = _agreeing(signatures, places) / signatures.shape[1]
    return shares


def _candidates(group: Run, files: Sequence[ArrayFile], low: int, high: int) -> Iterator[UInt64Array]:
    """The pairs of some documents of a group, sorted, each once; in parts where they are many."""
    inside = ArrayFile(group.path)
    edges = (low, high)
    own = [inside.position("pairs", edge - group.first << 32) for edge in edges]
    bounds = [[file.row_position("pairs", edge) for edge in edges] for file in files]
    if own[1] - own[0] + sum(end - begin for begin, end in bounds) > _PAIRS_AT_ONCE and high - low > 1:
        middle = (low + high) // 2
        yield from _candidates(group, files, low, middle)
        yield from _candidates(group, files, middle, high)
        return
    packed = inside.rows("pairs", *own)
    mine = np.stack([packed >> np.uint64(32), packed & np.uint64(0xFFFFFFFF)], axis=1) + np.uint64(group.first)
    found = [file.rows("pairs", *bound) for file, bound in zip(files, bounds, strict=True) if bound[0] < bound[1]]
    pairs = np.concatenate([mine, *found])
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    new = np.ones(len(pairs), np.bool_)
    new[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
    yield pairs[new]


def _signatures(runs: Runs, ordinals: UInt64Array) -> UInt16Array:
    """The signatures of some documents, whose ordinals are sorted; one run after the other is read."""
    owner = np.searchsorted(runs.firsts, ordinals, side="right") - 1
    edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
    return np.concatenate(
        [
            ArrayFile(runs.path(run := int(owner[low]))).take("signatures", ordinals[low:high] - runs.firsts[run])
            for low, high in pairwise(edges)
        ]
    )


@numba.njit(cache=True, nogil=True)
def _agreeing(signatures: UInt16Array, places: Int64Array) -> Int64Array:
    counts = np.zeros(len(places), np.int64)
    for at in range(len(places)):
        one, two = signatures[places[at, 0]], signatures[places[at, 1]]
        same = 0
        for i in range(one.size):
            same += one[i] == two[i]
        counts[at] = same
    return counts
