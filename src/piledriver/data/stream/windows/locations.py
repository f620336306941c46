"""Locations: the token ranges of sources in the shards, and where windows and the documents in them start."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from piledriver.data.tokens.token_set import TokenSet

Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class WindowLocations:
    """One entry per window."""

    sources: Array
    """Number of each window's source."""
    windows: Array
    """Number of each window in its source."""
    rows: Array | None = None
    """Row of each window in a `MmapView`; None for packed windows."""
    crossing: list[int] = field(default_factory=list)
    """Windows that cross the end of a token range: their rows must not be read."""
    edges: Array | None = None
    """`document_starts[edges[i]:edges[i + 1]]` are those of window i; None where documents are not told apart."""
    document_starts: npt.NDArray[np.int32] | None = None
    """Starts of documents inside windows, relative to a window's first token."""

    def slice(self, low: int, high: int) -> WindowLocations:
        """Return the windows from `low` up to `high`."""
        edges, starts = self.edges, self.document_starts
        if edges is not None and starts is not None:
            edges = edges[low : high + 1]
            starts, edges = starts[edges[0] : edges[-1]], edges - edges[0]
        return WindowLocations(
            sources=self.sources[low:high],
            windows=self.windows[low:high],
            rows=None if self.rows is None else self.rows[low:high],
            crossing=[
                at - low for at in self.crossing[bisect_left(self.crossing, low) : bisect_left(self.crossing, high)]
            ],
            edges=edges,
            document_starts=starts,
        )

    @staticmethod
    def concatenate(parts: list[WindowLocations]) -> WindowLocations:
        """Return several locations after each other; at least one."""
        begins = np.cumsum([0, *(len(part.windows) for part in parts)]).tolist()
        rows = [part.rows for part in parts if part.rows is not None]
        counts = [np.diff(part.edges) for part in parts if part.edges is not None]
        starts = [part.document_starts for part in parts if part.document_starts is not None]
        return WindowLocations(
            sources=np.concatenate([part.sources for part in parts]),
            windows=np.concatenate([part.windows for part in parts]),
            rows=np.concatenate(rows) if rows else None,
            crossing=[at + begin for part, begin in zip(parts, begins, strict=False) for at in part.crossing],
            edges=np.cumsum(np.concatenate([np.zeros(1, np.int64), *counts])) if counts else None,
            document_starts=np.concatenate(starts) if starts else None,
        )


@dataclass(frozen=True)
class TokenRange:
    """Tokens `start` to `stop` of a shard: complete documents of one source and one licence."""

    shard: int
    start: int
    stop: int
    first_row: int
    """First of its documents in the shard."""
    last_row: int
    """Document after its last one."""


def ranges_by_source(
    tokens: TokenSet, exclude_sources: frozenset[str], exclude_licences: frozenset[str]
) -> dict[str, list[TokenRange]]:
    """Return the token ranges of each source, sorted by name, without what is excluded."""
    found: dict[str, list[TokenRange]] = {}
    for number, shard in enumerate(tokens.shards):
        start = row = 0
        for group in shard.metadata["groups"]:
            one = TokenRange(number, start, start + group["tokens"], row, row + group["documents"])
            start, row = one.stop, one.last_row
            if group["source"] not in exclude_sources and group["licence"] not in exclude_licences:
                found.setdefault(group["source"], []).append(one)
    return dict(sorted(found.items()))
