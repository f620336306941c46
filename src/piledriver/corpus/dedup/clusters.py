"""Edges to clusters: every document of a connected group gets the number of the first of the group.

Union-find over a table of parents. The table is a sparse file that is mapped, one entry for each document of the
corpus, and its pages are given back to the system after every block of edges: what stays resident is a block, whatever
the size of the corpus.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator

import numba
import numpy as np
import numpy.typing as npt

from piledriver.core import storage
from piledriver.corpus.dedup.arrays import ArrayFile, growing_array

UInt64Array = npt.NDArray[np.uint64]


def label(edge_files: Iterable[str], documents: int, path: storage.Location, *, block: int = 1 << 16) -> int:
    """Write rows (document, first document of its cluster) for every document with an edge; returns how many."""
    table_path = f"{os.fspath(path)}.parents"
    count = 0
    with open(table_path, "w+b") as table_file:
        table_file.truncate(8 * max(1, documents))
        with mmap.mmap(table_file.fileno(), 0) as table, growing_array(path, "clusters", _NO_ROWS) as append:
            # 0 is "no edge yet"; otherwise an entry is its parent's number plus one.
            parents = np.frombuffer(table, np.uint64)
            for edges in _blocks(edge_files, block):
                _union(edges, parents)
                table.madvise(mmap.MADV_DONTNEED)
            for low in range(0, documents, block):
                members = np.flatnonzero(parents[low : low + block]).astype(np.uint64) + np.uint64(low)
                append(np.stack([members, _roots(members, parents)], axis=1))
                count += len(members)
                table.madvise(mmap.MADV_DONTNEED)
            del parents
    os.unlink(table_path)
    return count


_NO_ROWS = np.empty((0, 2), np.uint64)


def _blocks(edge_files: Iterable[str], block: int) -> Iterator[UInt64Array]:
    for edge_file in edge_files:
        file = ArrayFile(edge_file)
        low = 0
        while len(edges := file.rows("edges", low, low + block)):
            yield edges
            low += block


@numba.njit(cache=True, nogil=True)
def _root(node: np.int64, parents: UInt64Array) -> np.int64:
    while parents[node] != node + 1:
        above = np.int64(parents[node]) - 1
        # Path halving keeps the trees flat without a second walk.
        parents[node] = parents[above]
        node = np.int64(parents[node]) - 1
    return node


@numba.njit(cache=True, nogil=True)
def _union(edges: UInt64Array, parents: UInt64Array) -> None:
    """The smaller number becomes the root, so that a root is the first of its cluster."""
    for at in range(len(edges)):
        one, two = np.int64(edges[at, 0]), np.int64(edges[at, 1])
        for node in (one, two):
            if parents[node] == 0:
                parents[node] = node + 1
        one, two = _root(one, parents), _root(two, parents)
        if one < two:
            parents[two] = one + 1
        elif two < one:
            parents[one] = two + 1


@numba.njit(cache=True, nogil=True)
def _roots(nodes: UInt64Array, parents: UInt64Array) -> UInt64Array:
    roots = np.empty_like(nodes)
    for at in range(len(nodes)):
        roots[at] = _root(np.int64(nodes[at]), parents)
    return roots
