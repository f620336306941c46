"""Connected components: give every document that has an edge the number of the first document of its component.

Union-find over a table of parents. The table is a sparse, memory-mapped file with one entry for each document of the
corpus; its pages are returned to the system after every block of edges. So a process holds one block, whatever the size
of the corpus.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator

import numba
import numpy as np

from piledriver.corpus.dedup.arrays import UInt64Array, growing_array, open_array


def label_components(edge_folders: Iterable[str], documents: int, folder: str, *, block: int = 1 << 16) -> int:
    """Write `clusters`, rows (document, first document of its component) sorted by document; return how many.

    Each of the edge folders holds an array `edges` of pairs of documents.
    """
    table_path = os.path.join(folder, "parents")
    os.makedirs(folder, exist_ok=True)
    count = 0
    with open(table_path, "w+b") as table_file:
        table_file.truncate(8 * max(1, documents))
        with mmap.mmap(table_file.fileno(), 0) as table, growing_array(folder, "clusters", np.uint64, 2) as append:
            # 0 means no edge yet; otherwise an entry is its parent's number plus one.
            parents = np.frombuffer(table, np.uint64)
            for edges in _blocks(edge_folders, block):
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


def cluster_rows(folder: str, first: int, count: int) -> UInt64Array:
    """Return the rows of `clusters` for the documents [first, first + count)."""
    clusters = open_array(folder, "clusters")
    low, high = np.searchsorted(clusters[:, 0], np.array([first, first + count], np.uint64)).tolist()
    return np.array(clusters[low:high])


def _blocks(edge_folders: Iterable[str], block: int) -> Iterator[UInt64Array]:
    for folder in edge_folders:
        edges = open_array(folder, "edges")
        for low in range(0, len(edges), block):
            yield np.array(edges[low : low + block])


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
    """Join components; the smaller number becomes the root, so a root is the first of its component."""
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
