"""Near-duplicates in bounded memory: sorted runs on disk, then merges by ranges of hashes.

Five steps. Each is a pure function from array folders to one array folder, so any executor can run them in any order,
and again after a crash:

1. `sign_texts` (a chunk of documents): MinHash signatures.
2. `sort_bands` (a group of chunks, some 10^5 documents): the sorted hashes of each band, and the candidate pairs inside
   the group. Of the documents that share a hash only the first and the last are kept for step 3, so a bucket of any
   size contributes at most two entries a group.
3. `find_candidates` (one band, one range of hashes): pairs of documents of different groups with equal hashes.
4. `verify_candidates` (some groups): each candidate pair once, by its signatures; pairs over the threshold are edges.
5. `clusters.label_components`: connected documents get the number of the first of them.

A document is known by its ordinal (`runs.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numba
import numpy as np
import numpy.typing as npt

from piledriver.corpus.dedup.arrays import (
    Int64Array,
    UInt16Array,
    UInt64Array,
    growing_array,
    open_array,
    position,
    write_arrays,
)
from piledriver.corpus.dedup.minhash import MinHashSettings, Signer, band_hashes
from piledriver.corpus.dedup.runs import RunLookup, SortedRun

_VERIFIED_AT_ONCE = 1 << 16
_NO_PAIRS = np.empty((0, 2), np.uint64)


def sign_texts(texts: Iterable[str], settings: MinHashSettings, folder: str) -> int:
    """Write `signatures`, one row a text; return how many."""
    signer = Signer(settings)
    signatures = [signer(text) for text in texts]
    stacked = np.stack(signatures) if signatures else np.empty((0, settings.permutations), np.uint16)
    write_arrays(folder, signatures=stacked)
    return len(signatures)


def sort_bands(runs: Sequence[SortedRun], settings: MinHashSettings, folder: str) -> int:
    """Sort the bands of some consecutive runs; return how many documents they have.

    Writes `hashes` and `documents` of all bands after each other, `ends` of each band in them, and `pairs`: the
    candidates inside the group as (earlier << 32 | later), counted from the start of the group, sorted.
    """
    signatures = np.concatenate([open_array(run.folder, "signatures") for run in runs])
    hashes, documents, pairs, ends = [], [], [np.empty(0, np.uint64)], [0]
    for band in range(settings.bands):
        values = band_hashes(signatures, band, settings.rows)
        order = np.argsort(values, kind="stable").astype(np.uint64)
        values = values[order]
        begins, later = _buckets(values)
        inside = _pairs_in_buckets(order, begins, later)
        pairs.append(np.unique((inside[:, 0] << np.uint64(32)) | inside[:, 1]))
        lasts = np.concatenate([begins[1:], [len(values)]]) - 1 if len(begins) else begins
        ends_of_buckets = np.union1d(begins, lasts)
        hashes.append(values[ends_of_buckets])
        documents.append(order[ends_of_buckets].astype(np.uint32))
        ends.append(ends[-1] + len(ends_of_buckets))
    write_arrays(
        folder,
        ends=np.array(ends, np.int64),
        hashes=np.concatenate(hashes),
        documents=np.concatenate(documents),
        pairs=np.unique(np.concatenate(pairs)),
    )
    return len(signatures)


def find_candidates(groups: Iterable[SortedRun], band: int, hashes: tuple[int, int], folder: str) -> int:
    """Write `pairs`: candidates between groups in one band and range of hashes, sorted; return how many.

    In a bucket of equal hashes each document is paired with the one before it and with the first, so that a bucket of
    n documents costs 2 n pairs, not n squared.
    """
    found_hashes, found_ordinals = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for group in groups:
        values, documents = (open_array(group.folder, name) for name in ("hashes", "documents"))
        begin, end = open_array(group.folder, "ends")[band : band + 2].tolist()
        low, high = (begin + position(values[begin:end], edge) for edge in hashes)
        found_hashes.append(np.array(values[low:high]))
        found_ordinals.append(documents[low:high].astype(np.uint64) + np.uint64(group.first))
    values, ordinals = np.concatenate(found_hashes), np.concatenate(found_ordinals)
    found_hashes.clear()
    found_ordinals.clear()
    # Groups come in the order of the corpus, so a stable sort leaves equal hashes in the order of their documents.
    order = np.argsort(values, kind="stable")
    values, ordinals = values[order], ordinals[order]
    del order
    pairs = _pairs_in_buckets(ordinals, *_buckets(values))
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    write_arrays(folder, pairs=pairs)
    return len(pairs)


def _buckets(values: UInt64Array) -> tuple[Int64Array, Int64Array]:
    """Return (where each bucket of equal values begins, all other places) of sorted values."""
    new = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return np.flatnonzero(new), np.flatnonzero(~new)


def _pairs_in_buckets(ordinals: UInt64Array, begins: Int64Array, later: Int64Array) -> UInt64Array:
    """Pair each later member of a bucket with the one before it and, where that is another, with the bucket's first."""
    if not len(later):
        return _NO_PAIRS
    first = begins[np.searchsorted(begins, later, side="right") - 1]
    far = first != later - 1
    earlier = np.concatenate([later - 1, first[far]])
    return np.stack([ordinals[earlier], ordinals[np.concatenate([later, later[far]])]], axis=1)


def verify_candidates(
    runs: RunLookup,
    groups: Sequence[SortedRun],
    candidates: Sequence[str],
    threshold: float,
    folder: str,
    *,
    pairs_at_once: int = 1 << 21,
) -> int:
    """Write `edges`: the candidate pairs whose estimated similarity reaches the threshold; return how many.

    The pairs are those whose earlier document is in one of `groups`, from the groups themselves and from the array
    folders in `candidates`. At most `pairs_at_once` are held in memory: 16 bytes each, and copies while sorting.
    """
    files = [open_array(candidate, "pairs") for candidate in candidates]
    count = 0
    with growing_array(folder, "edges", np.uint64, 2) as append:
        for group in groups:
            for pairs in _candidates(group, files, group.first, group.first + group.count, pairs_at_once):
                for at in range(0, len(pairs), _VERIFIED_AT_ONCE):
                    block = pairs[at : at + _VERIFIED_AT_ONCE]
                    edges = block[estimate_similarity(runs, block) >= threshold]
                    count += len(edges)
                    append(edges)
    return count


def estimate_similarity(runs: RunLookup, pairs: UInt64Array) -> npt.NDArray[np.float64]:
    """Return the estimated Jaccard similarity of each pair: the share of hash values that their signatures share."""
    if not len(pairs):
        return np.empty(0)
    ordinals, places = np.unique(pairs, return_inverse=True)
    signatures = _signatures(runs, ordinals)
    places = places.reshape(pairs.shape)
    shares: npt.NDArray[np.float64] = _agreeing(signatures, places) / signatures.shape[1]
    return shares


def _candidates(
    group: SortedRun, files: Sequence[UInt64Array], low: int, high: int, pairs_at_once: int
) -> Iterator[UInt64Array]:
    """Yield the pairs whose earlier document is in [low, high), sorted, each once; in parts if they are many."""
    inside = open_array(group.folder, "pairs")
    edges = (low, high)
    own = slice(*(position(inside, edge - group.first << 32) for edge in edges))
    found = [file[slice(*(position(file[:, 0], edge) for edge in edges))] for file in files]
    if own.stop - own.start + sum(map(len, found)) > pairs_at_once and high - low > 1:
        middle = (low + high) // 2
        yield from _candidates(group, files, low, middle, pairs_at_once)
        yield from _candidates(group, files, middle, high, pairs_at_once)
        return
    packed = inside[own]
    mine = np.stack([packed >> np.uint64(32), packed & np.uint64(0xFFFFFFFF)], axis=1) + np.uint64(group.first)
    pairs = np.concatenate([mine, *found])
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    new = np.ones(len(pairs), np.bool_)
    new[1:] = (pairs[1:] != pairs[:-1]).any(axis=1)
    yield pairs[new]


def _signatures(runs: RunLookup, ordinals: UInt64Array) -> UInt16Array:
    """Return the signatures of documents with sorted ordinals, reading one run after the other."""
    owner = np.searchsorted(runs.firsts, ordinals, side="right") - 1
    edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
    found = []
    for low, high in pairwise(edges):
        run = int(owner[low])
        rows = (ordinals[low:high] - runs.firsts[run]).astype(np.int64)
        found.append(open_array(runs.folder(run), "signatures")[rows])
    return np.concatenate(found)


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
