"""`ContiguousWindows`: documents of a source end to end, cut every `seq_len` tokens.

A window is read with the token after it, so that every token is predicted once. Memory is a few numbers per token
range, however large the corpus.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from piledriver.core.errors import CorruptFileError
from piledriver.data.stream.windows.batch import WindowBatch
from piledriver.data.stream.windows.locations import TokenRange, WindowLocations
from piledriver.data.tokens.token_set import TokenSet

Array = npt.NDArray[np.int64]


class ContiguousWindows:
    """Windows of sources, by (source number, window number). With `find_documents`, batches know document starts."""

    padding = 0.0
    """Share of padding in an epoch's tokens."""

    def __init__(
        self, tokens: TokenSet, ranges: dict[str, list[TokenRange]], seq_len: int, *, find_documents: bool
    ) -> None:
        self.seq_len, self.find_documents = seq_len, find_documents
        self.boundary = tokens.boundary
        self._arrays = [shard.tokens for shard in tokens.shards]
        self._document_starts = [shard.starts for shard in tokens.shards]
        self._view = MmapView(self._arrays, seq_len + 1)
        flat = [one for some in ranges.values() for one in some]
        lengths = np.array([one.stop - one.start for one in flat], dtype=np.int64)
        # All ranges end to end: range i covers positions edges[i] to edges[i + 1].
        self._edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self._shards = np.array([one.shard for one in flat], dtype=np.int64)
        self._starts = np.array([one.start for one in flat], dtype=np.int64)
        firsts = np.cumsum([0, *(len(some) for some in ranges.values())])
        self._bases = self._edges[firsts[:-1]]
        totals = self._edges[firsts[1:]] - self._bases
        self.counts = {name: max(0, int(n - 1) // seq_len) for name, n in zip(ranges, totals, strict=True)}
        self.dropped_tokens = int(sum(n - self.counts[name] * seq_len for name, n in zip(ranges, totals, strict=True)))

    def locate(self, sources: Array, windows: Array) -> WindowLocations:
        """Return where windows are in the shards, and where documents start in them."""
        positions = self._bases[sources] + windows * self.seq_len
        which = np.searchsorted(self._edges, positions, side="right") - 1
        shards, firsts = self._shards[which], self._starts[which] + positions - self._edges[which]
        room = self._edges[which + 1] - positions
        edges, starts = self._starts_inside(shards, firsts, room) if self.find_documents else (None, None)
        return WindowLocations(
            sources=sources,
            windows=windows,
            rows=self._view.rows(shards, firsts),
            crossing=np.flatnonzero(room <= self.seq_len).tolist(),
            edges=edges,
            document_starts=starts,
        )

    def read(self, locations: WindowLocations) -> WindowBatch:
        """Return the windows at these locations."""
        assert locations.rows is not None
        if locations.crossing:
            tokens = np.empty((len(locations.windows), self.seq_len + 1), self._arrays[0].dtype)
            inside = np.delete(np.arange(len(tokens)), locations.crossing)
            tokens[inside] = self._view.copy(locations.rows[inside])
            for number in locations.crossing:
                parts = self.segments(int(locations.sources[number]), int(locations.windows[number]))
                tokens[number] = np.concatenate([self._arrays[shard][at : at + size] for shard, at, size in parts])
        else:
            tokens = self._view.copy(locations.rows)
        starts = self._flat_starts(locations, tokens)
        return WindowBatch(inputs=tokens[:, :-1], labels=tokens[:, 1:], used=None, starts=starts)

    def segments(self, source: int, window: int) -> list[tuple[int, int, int]]:
        """Return (shard, first token, length) of each part of a window, including the token after it."""
        position = int(self._bases[source]) + window * self.seq_len
        left, parts = self.seq_len + 1, []
        which = int(np.searchsorted(self._edges, position, side="right")) - 1
        while left:
            length = min(left, int(self._edges[which + 1]) - position)
            first = int(self._starts[which]) + position - int(self._edges[which])
            parts.append((int(self._shards[which]), first, length))
            position, left, which = position + length, left - length, which + 1
        return parts

    def windows_of(self, source: int, shard: int, start: int, stop: int) -> range:
        """Return the windows of a source that hold any of these tokens of a shard."""
        which = np.flatnonzero((self._shards == shard) & (self._starts <= start))
        which = which[np.argmax(self._starts[which])]
        position = int(self._edges[which]) + start - int(self._starts[which]) - int(self._bases[source])
        first, last = position // self.seq_len, (position + stop - start - 1) // self.seq_len
        count = list(self.counts.values())[source]
        return range(min(first, count), min(last + 1, count))

    def _flat_starts(self, locations: WindowLocations, tokens: npt.NDArray[Any]) -> Array:
        """Return the start of each document in the flattened batch; the start of each window counts as one."""
        length = self.seq_len
        row_starts = np.arange(0, len(tokens) * length, length, dtype=np.int64)
        if locations.edges is None or locations.document_starts is None:
            return row_starts
        inner = np.repeat(row_starts, np.diff(locations.edges)) + locations.document_starts
        crossing = [
            number * length + np.flatnonzero(tokens[number, 1:length] == self.boundary) + 1
            for number in locations.crossing
        ]
        starts = np.concatenate([row_starts, inner, *crossing])
        starts.sort()
        return starts

    def _starts_inside(self, shards: Array, firsts: Array, room: Array) -> tuple[Array, npt.NDArray[np.int32]]:
        """Return (edges, starts): documents start in window i at `starts[edges[i]:edges[i + 1]]`.

        Starts are relative to the window's first token. Windows that cross the end of a range have none.
        """
        # Sorted by location: searching for neighbours after each other is many times faster.
        inside = np.flatnonzero(room > self.seq_len)
        ordered = inside[np.argsort((shards[inside] << 40) + firsts[inside])]
        first, shard = firsts[ordered], shards[ordered]
        low, high = np.empty_like(first), np.empty_like(first)
        cuts = [0, *(np.flatnonzero(np.diff(shard)) + 1).tolist(), len(shard)] if len(shard) else [0]
        by_shard = [(slice(i, j), self._document_starts[int(shard[i])]) for i, j in pairwise(cuts)]
        for part, starts in by_shard:
            low[part] = np.searchsorted(starts, first[part], side="right")
            high[part] = np.searchsorted(starts, first[part] + self.seq_len, side="left")
        counts = high - low
        inner = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        documents, begins = np.repeat(low, counts) + inner, np.repeat(first, counts)
        spread = np.concatenate([[0], np.cumsum(counts)])
        by_window = np.zeros(len(firsts), np.int64)
        by_window[ordered] = counts
        edges = np.concatenate([[0], np.cumsum(by_window)]).astype(np.int64)
        targets = np.repeat(edges[ordered], counts) + inner
        found = np.empty(len(inner), np.int32)
        for part, starts in by_shard:
            here = slice(int(spread[part.start]), int(spread[part.stop]))
            found[targets[here]] = starts[documents[here]] - begins[here]
        return edges, found


class MmapView:
    """Windows of `width` tokens from any of several arrays of one dtype, copied by one numpy indexing operation.

    The arrays are mapped somewhere in this process's address space. One strided view starts at the lowest address; its
    row i is the window that begins i tokens later, so that every position of every array is a row. Rows between the
    maps are never read.
    """

    def __init__(self, arrays: list[npt.NDArray[Any]], width: int) -> None:
        # Holding the arrays keeps their maps alive.
        self._arrays = arrays
        size = arrays[0].dtype.itemsize
        origins = [int(array.__array_interface__["data"][0]) for array in arrays]
        lowest = min(origins)
        if any((origin - lowest) % size for origin in origins):
            raise CorruptFileError(
                "the token shards are not aligned to tokens in memory", fix="tokenise the corpus again"
            )
        self._offsets = np.array([(origin - lowest) // size for origin in origins], dtype=np.int64)
        count = max(int(offset) + len(array) for offset, array in zip(self._offsets, arrays, strict=True))
        self._windows = np.lib.stride_tricks.as_strided(
            arrays[origins.index(lowest)], (count, width), (size, size), writeable=False
        )

    def rows(self, shards: Array, firsts: Array) -> Array:
        """Return the row of each window, given its shard and first token. A window must end within its shard."""
        return self._offsets[shards] + firsts

    def copy(self, rows: Array) -> npt.NDArray[Any]:
        """Return a copy of the windows in these rows."""
        return self._windows[rows]
