"""`Places`: where windows lie and where documents begin in them, worked out for many windows at once."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True)
class Places:
    """A row per window, as plain lists where a loop reads them."""

    lanes: list[int]
    windows: list[int]
    shards: list[int] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    """The first token of each window in its shard."""
    over: list[int] = field(default_factory=list)
    """The windows that run over the end of a stretch."""
    edges: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))
    """`boundaries[edges[i]:edges[i + 1]]` are those of window i."""
    boundaries: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Where documents begin inside windows, counted from a window's first token."""

    def part(self, low: int, high: int) -> Places:
        """The windows from `low` up to `high`."""
        edges = self.edges[low : high + 1]
        return Places(
            lanes=self.lanes[low:high],
            windows=self.windows[low:high],
            shards=self.shards[low:high],
            firsts=self.firsts[low:high],
            over=[number - low for number in self.over[bisect_left(self.over, low) : bisect_left(self.over, high)]],
            edges=edges - edges[0] if len(edges) else edges,
            boundaries=self.boundaries[edges[0] : edges[-1]] if len(edges) else self.boundaries,
        )

    @staticmethod
    def joined(parts: list[Places]) -> Places:
        """Parts one after the other."""
        counts = [np.diff(part.edges) for part in parts]
        begins = np.cumsum([0, *(len(part.windows) for part in parts)]).tolist()
        return Places(
            lanes=[lane for part in parts for lane in part.lanes],
            windows=[window for part in parts for window in part.windows],
            shards=[shard for part in parts for shard in part.shards],
            firsts=[first for part in parts for first in part.firsts],
            over=[number + begin for part, begin in zip(parts, begins, strict=False) for number in part.over],
            edges=np.cumsum([0, *(count for counted in counts for count in counted.tolist())], dtype=np.int64),
            boundaries=np.concatenate([np.zeros(0, np.int32), *(part.boundaries for part in parts)]),
        )
