"""Where windows lie in the shards: each way of cutting the tokens of the sources (lanes) into windows of one length.

A lane is what is left of a source after exclusions: stretches of tokens in shards, one after the other.

- `Stretches`: the lane's tokens as one text, cut every `seq_len` tokens. A window is read with the token after it, so
  that every token is predicted once. Memory: a few numbers per stretch, however large the corpus.
- `Pieces`: documents, cut where they are longer than a window, one to a window or packed by best fit. Memory: 16 bytes
  per document and piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from piledriver.data.stream.packing import best_fit
from piledriver.data.tokens.token_set import TokenSet

Array = npt.NDArray[np.int64]
# Best fit looks at this many pieces at a time, which bounds its memory and its time.
_PACKED_TOGETHER = 1 << 20


@dataclass(frozen=True)
class Stretch:
    """Tokens `start` to `stop` of a shard: one source, one licence, whole documents."""

    shard: int
    start: int
    stop: int
    first_row: int
    last_row: int


def stretches_by_source(
    tokens: TokenSet, exclude_sources: frozenset[str], exclude_licences: frozenset[str]
) -> dict[str, list[Stretch]]:
    """What each source has, without what is excluded."""
    lanes: dict[str, list[Stretch]] = {}
    for number, shard in enumerate(tokens.shards):
        start = row = 0
        for group in shard.note["groups"]:
            stretch = Stretch(number, start, start + group["tokens"], row, row + group["documents"])
            start, row = stretch.stop, stretch.last_row
            if group["source"] not in exclude_sources and group["licence"] not in exclude_licences:
                lanes.setdefault(group["source"], []).append(stretch)
    return dict(sorted(lanes.items()))


class Stretches:
    """Lanes cut every `seq_len` tokens."""

    def __init__(self, lanes: dict[str, list[Stretch]], seq_len: int) -> None:
        self.seq_len = seq_len
        flat = [stretch for stretches in lanes.values() for stretch in stretches]
        lengths = np.array([stretch.stop - stretch.start for stretch in flat], dtype=np.int64)
        self.edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.shards = np.array([stretch.shard for stretch in flat], dtype=np.int64)
        self.starts = np.array([stretch.start for stretch in flat], dtype=np.int64)
        firsts = np.cumsum([0, *(len(stretches) for stretches in lanes.values())])
        self.bases = self.edges[firsts[:-1]]
        totals = self.edges[firsts[1:]] - self.bases
        self.windows = {name: max(0, int(n - 1) // seq_len) for name, n in zip(lanes, totals, strict=True)}
        self.dropped_tokens = int(sum(n - self.windows[name] * seq_len for name, n in zip(lanes, totals, strict=True)))

    def spans(self, lanes: Array, windows: Array) -> tuple[Array, Array, Array]:
        """(shard, first token, tokens up to the end of the stretch) of each window; a window may run into the next."""
        positions = self.bases[lanes] + windows * self.seq_len
        which = np.searchsorted(self.edges, positions, side="right") - 1
        return self.shards[which], self.starts[which] + positions - self.edges[which], self.edges[which + 1] - positions

    def boundaries(
        self, shards: Array, firsts: Array, room: Array, document_starts: list[Array]
    ) -> tuple[Array, npt.NDArray[np.int32]]:
        """(edges, places): documents begin inside window i at `places[edges[i]:edges[i + 1]]`, counted from its first
        token; windows that run over the end of a stretch are left out.
        """
        # In the order in which they lie: neighbours in a search are found many times faster than strangers.
        whole = np.flatnonzero(room > self.seq_len)
        lying = whole[np.argsort((shards[whole] << 40) + firsts[whole])]
        first, shard = firsts[lying], shards[lying]
        low, high = np.empty_like(first), np.empty_like(first)
        cuts = [0, *(np.flatnonzero(np.diff(shard)) + 1).tolist(), len(shard)] if len(shard) else [0]
        groups = [(slice(i, j), document_starts[int(shard[i])]) for i, j in pairwise(cuts)]
        for part, starts in groups:
            low[part] = np.searchsorted(starts, first[part], side="right")
            high[part] = np.searchsorted(starts, first[part] + self.seq_len, side="left")
        counts = high - low
        inner = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        documents, begins = np.repeat(low, counts) + inner, np.repeat(first, counts)
        spread = np.concatenate([[0], np.cumsum(counts)])
        in_order = np.zeros(len(firsts), np.int64)
        in_order[lying] = counts
        edges = np.concatenate([[0], np.cumsum(in_order)]).astype(np.int64)
        targets = np.repeat(edges[lying], counts) + inner
        places = np.empty(len(inner), np.int32)
        for part, starts in groups:
            here = slice(int(spread[part.start]), int(spread[part.stop]))
            places[targets[here]] = starts[documents[here]] - begins[here]
        return edges, places

    def segments(self, lane: int, window: int, extra: int = 1) -> list[tuple[int, int, int]]:
        """(shard, first token, length) of each part of a window, with `extra` tokens after it."""
        position = int(self.bases[lane]) + window * self.seq_len
        left, parts = self.seq_len + extra, []
        which = int(np.searchsorted(self.edges, position, side="right")) - 1
        while left:
            length = min(left, int(self.edges[which + 1]) - position)
            first = int(self.starts[which]) + position - int(self.edges[which])
            parts.append((int(self.shards[which]), first, length))
            position, left, which = position + length, left - length, which + 1
        return parts

    def windows_of(self, lane: int, shard: int, start: int, stop: int) -> range:
        """The windows of a lane that hold any of these tokens of a shard."""
        which = np.flatnonzero((self.shards == shard) & (self.starts <= start))
        which = which[np.argmax(self.starts[which])]
        position = int(self.edges[which]) + start - int(self.starts[which]) - int(self.bases[lane])
        first, last = position // self.seq_len, (position + stop - start - 1) // self.seq_len
        count = list(self.windows.values())[lane]
        return range(min(first, count), min(last + 1, count))


class Pieces:
    """Documents, or what a window holds of them."""

    def __init__(self, tokens: TokenSet, lanes: dict[str, list[Stretch]], seq_len: int, pack: bool) -> None:
        self.seq_len = seq_len
        self.lanes = [_Lane(tokens, stretches, seq_len, pack) for stretches in lanes.values()]
        self.windows = {name: lane.window_count for name, lane in zip(lanes, self.lanes, strict=True)}
        self.dropped_tokens = 0

    def segments(self, lane: int, window: int) -> list[tuple[int, int, int]]:
        """(shard, first token, length) of each piece in a window."""
        return self.lanes[lane].segments(window)

    def windows_of(self, lane: int, shard: int, start: int, stop: int) -> list[int]:
        """The windows of a lane that hold any of these tokens of a shard."""
        return self.lanes[lane].windows_of(shard, start, stop)

    @property
    def used_tokens(self) -> int:
        """Tokens in all windows, padding not counted."""
        return sum(int(lane.lengths.sum()) for lane in self.lanes)


class _Lane:
    """The pieces of one source: every document cut into parts of at most `seq_len` tokens."""

    def __init__(self, tokens: TokenSet, stretches: list[Stretch], seq_len: int, pack: bool) -> None:
        shards, firsts, lengths = [], [], []
        for stretch in stretches:
            edges = tokens.shards[stretch.shard].starts[stretch.first_row : stretch.last_row + 1]
            sizes = np.diff(edges)
            counts = -(-sizes // seq_len)
            document = np.repeat(np.arange(len(sizes)), counts)
            part = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
            firsts.append(edges[:-1][document] + part * seq_len)
            lengths.append(np.minimum(seq_len, sizes[document] - part * seq_len))
            shards.append(np.full(len(document), stretch.shard, np.int32))
        self.shards = np.concatenate(shards)
        self.firsts = np.concatenate(firsts)
        self.lengths = np.concatenate(lengths).astype(np.int32)
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
        places = np.flatnonzero(np.isin(self.items, pieces))
        return sorted({int(w) for w in np.searchsorted(self.edges, places, side="right") - 1})

    def _pack(self, seq_len: int) -> None:
        edges, items = [np.zeros(1, np.int64)], []
        for begin in range(0, len(self.lengths), _PACKED_TOGETHER):
            some_edges, some_items = best_fit(self.lengths[begin : begin + _PACKED_TOGETHER], seq_len)
            edges.append(some_edges[1:] + begin)
            items.append(some_items + begin)
        self.edges = np.concatenate(edges)
        self.items = np.concatenate(items) if items else np.empty(0, np.int64)
