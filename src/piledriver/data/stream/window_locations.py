"""`Places`: where windows lie and where documents begin in them, worked out for many windows at once."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]


def _none() -> Array:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True)
class Places:
    """A row per window."""

    lanes: Array
    windows: Array
    addresses: Array = field(default_factory=_none)
    """Where each window of a stretch lies in `OneView`; nothing for the other ways to cut."""
    over: list[int] = field(default_factory=list)
    """The windows that run over the end of a stretch: their addresses must not be used."""
    edges: Array = field(default_factory=_none)
    """`boundaries[edges[i]:edges[i + 1]]` are those of window i."""
    boundaries: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Where documents begin inside windows, counted from a window's first token."""

    def part(self, low: int, high: int) -> Places:
        """The windows from `low` up to `high`."""
        edges = self.edges[low : high + 1]
        return Places(
            lanes=self.lanes[low:high],
            windows=self.windows[low:high],
            addresses=self.addresses[low:high],
            over=[number - low for number in self.over[bisect_left(self.over, low) : bisect_left(self.over, high)]],
            edges=edges - edges[0] if len(edges) else edges,
            boundaries=self.boundaries[edges[0] : edges[-1]] if len(edges) else self.boundaries,
        )

    @staticmethod
    def joined(parts: list[Places]) -> Places:
        """Parts one after the other."""
        begins = np.cumsum([0, *(len(part.windows) for part in parts)]).tolist()
        counts = [np.diff(part.edges) for part in parts if len(part.edges)]
        return Places(
            lanes=np.concatenate([_none(), *(part.lanes for part in parts)]),
            windows=np.concatenate([_none(), *(part.windows for part in parts)]),
            addresses=np.concatenate([_none(), *(part.addresses for part in parts)]),
            over=[number + begin for part, begin in zip(parts, begins, strict=False) for number in part.over],
            edges=np.cumsum(np.concatenate([np.zeros(1, np.int64), *counts])) if counts else _none(),
            boundaries=np.concatenate([np.zeros(0, np.int32), *(part.boundaries for part in parts)]),
        )
