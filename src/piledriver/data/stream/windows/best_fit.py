"""Best-fit packing: pack documents into windows with the least padding.

Best fit, longest first (Ding et al., "Fewer truncations improve language modeling", 2024). Windows are indexed by the
room they have left, so that each step searches over room sizes and not over windows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]


def best_fit(lengths: npt.NDArray[np.integer], capacity: int) -> tuple[Array, Array]:
    """Return (edges, items): window w holds the pieces `items[edges[w]:edges[w + 1]]`. Deterministic.

    >>> edges, items = best_fit(np.array([3, 6, 4, 7]), 10)
    >>> [items[edges[i]:edges[i + 1]].tolist() for i in range(len(edges) - 1)]
    [[3, 0], [1, 2]]
    """
    if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise ValueError(f"pieces must be from 1 to {capacity} tokens long")
    longest_first = np.argsort(-lengths.astype(np.int64), kind="stable")
    rooms = _Rooms(capacity)
    window_of = np.empty(len(lengths), np.int64)
    opened = 0
    for item, length in zip(longest_first.tolist(), lengths[longest_first].tolist(), strict=True):
        room = rooms.smallest_from(length)
        if room is None:
            window, room, opened = opened, capacity, opened + 1
        else:
            window = rooms.take(room)
        window_of[item] = window
        if room > length:
            rooms.add(room - length, window)
    # Within a window pieces stay in the order in which they were packed: longest first.
    by_window = longest_first[np.argsort(window_of[longest_first], kind="stable")]
    edges = np.concatenate([[0], np.cumsum(np.bincount(window_of, minlength=opened))]).astype(np.int64)
    return edges, by_window.astype(np.int64)


class _Rooms:
    """Windows indexed by the room left in them, with a bit set of the rooms that occur."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.windows: list[list[int]] = [[] for _ in range(capacity + 1)]
        # Bit r is set if some window has room r.
        self.bits = 0

    def smallest_from(self, room: int) -> int | None:
        above = self.bits >> room
        return room + (above & -above).bit_length() - 1 if above else None

    def take(self, room: int) -> int:
        windows = self.windows[room]
        window = windows.pop()
        if not windows:
            self.bits &= ~(1 << room)
        return window

    def add(self, room: int, window: int) -> None:
        self.windows[room].append(window)
        self.bits |= 1 << room
