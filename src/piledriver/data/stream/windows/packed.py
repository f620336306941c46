"""`PackedWindows`: documents, cut where they are longer than a window, one per window or packed by best fit.

Memory is 16 bytes per document or part of one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from piledriver.data.stream.windows.batch import WindowBatch
from piledriver.data.stream.windows.best_fit import best_fit
from piledriver.data.stream.windows.locations import TokenRange, WindowLocations
from piledriver.data.tokens.token_set import TokenSet

Array = npt.NDArray[np.int64]
# Documents that best fit considers together: bounds its memory and time.
_PACKED_TOGETHER = 1 << 20


class PackedWindows:
    """Windows of sources, by (source number, window number)."""

    dropped_tokens = 0

    def __init__(self, tokens: TokenSet, ranges: dict[str, list[TokenRange]], seq_len: int, *, pack: bool) -> None:
        self.seq_len, self.boundary = seq_len, tokens.boundary
        self._arrays = [shard.tokens for shard in tokens.shards]
        self._sources = [_Source(tokens, some, seq_len, pack) for some in ranges.values()]
        self.counts = {name: source.window_count for name, source in zip(ranges, self._sources, strict=True)}

    @property
    def padding(self) -> float:
        """Share of padding in the tokens of all windows."""
        used = sum(int(source.lengths.sum()) for source in self._sources)
        return 1 - used / (sum(self.counts.values()) * self.seq_len)

    def locate(self, sources: Array, windows: Array) -> WindowLocations:
        """Return the locations of windows: here nothing but their numbers."""
        return WindowLocations(sources=sources, windows=windows)

    def read(self, locations: WindowLocations) -> WindowBatch:
        """Return the windows at these locations, padded with the boundary token."""
        shape, length = (len(locations.windows), self.seq_len), self.seq_len
        inputs = np.full(shape, self.boundary, self._arrays[0].dtype)
        labels = np.full(shape, self.boundary, self._arrays[0].dtype)
        used = np.zeros(len(locations.windows), np.int64)
        starts: list[int] = []
        numbers = zip(locations.sources.tolist(), locations.windows.tolist(), strict=True)
        for row, (source, window) in enumerate(numbers):
            at = 0
            for shard, first, size in self.segments(source, window):
                array = self._arrays[shard]
                inputs[row, at : at + size] = array[first : first + size]
                # A document's last token is followed by the next boundary token, also at the end of a shard.
                following = array[first + 1 : first + size + 1]
                labels[row, at : at + len(following)] = following
                starts.append(row * length + at)
                at += size
            used[row] = at
            if at < length:
                starts.append(row * length + at)
        return WindowBatch(inputs=inputs, labels=labels, used=used, starts=np.array(starts, dtype=np.int64))

    def segments(self, source: int, window: int) -> list[tuple[int, int, int]]:
        """Return (shard, first token, length) of each document, or part of one, in a window."""
        return self._sources[source].segments(window)

    def windows_of(self, source: int, shard: int, start: int, stop: int) -> list[int]:
        """Return the windows of a source that hold any of these tokens of a shard."""
        return self._sources[source].windows_of(shard, start, stop)


class _Source:
    """The documents of one source, cut into pieces of at most `seq_len` tokens."""

    def __init__(self, tokens: TokenSet, ranges: list[TokenRange], seq_len: int, pack: bool) -> None:
        shards, firsts, lengths = [], [], []
        for one in ranges:
            edges = tokens.shards[one.shard].starts[one.first_row : one.last_row + 1]
            sizes = np.diff(edges)
            counts = -(-sizes // seq_len)
            document = np.repeat(np.arange(len(sizes)), counts)
            part = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
            firsts.append(edges[:-1][document] + part * seq_len)
            lengths.append(np.minimum(seq_len, sizes[document] - part * seq_len))
            shards.append(np.full(len(document), one.shard, np.int32))
        self.shards = np.concatenate(shards)
        self.firsts = np.concatenate(firsts)
        self.lengths = np.concatenate(lengths).astype(np.int32)
        # Window w holds the pieces items[edges[w]:edges[w + 1]]; without packing, window w is piece w.
        self.edges: Array | None = None
        self.items: Array | None = None
        if pack:
            self._pack(seq_len)

    @property
    def window_count(self) -> int:
        return len(self.lengths) if self.edges is None else len(self.edges) - 1

    def segments(self, window: int) -> list[tuple[int, int, int]]:
        if self.edges is None or self.items is None:
            held = [window]
        else:
            held = self.items[self.edges[window] : self.edges[window + 1]].tolist()
        return [(int(self.shards[item]), int(self.firsts[item]), int(self.lengths[item])) for item in held]

    def windows_of(self, shard: int, start: int, stop: int) -> list[int]:
        overlaps = (self.shards == shard) & (self.firsts < stop) & (self.firsts + self.lengths > start)
        pieces = np.flatnonzero(overlaps)
        if self.edges is None or self.items is None:
            return [int(piece) for piece in pieces]
        held = np.flatnonzero(np.isin(self.items, pieces))
        return sorted({int(w) for w in np.searchsorted(self.edges, held, side="right") - 1})

    def _pack(self, seq_len: int) -> None:
        edges, items = [np.zeros(1, np.int64)], []
        for begin in range(0, len(self.lengths), _PACKED_TOGETHER):
            some_edges, some_items = best_fit(self.lengths[begin : begin + _PACKED_TOGETHER], seq_len)
            edges.append(some_edges[1:] + begin)
            items.append(some_items + begin)
        self.edges = np.concatenate(edges)
        self.items = np.concatenate(items) if items else np.empty(0, np.int64)
