"""Mixture order: which window of which source is at an index, as a function of (seed, epoch, index).

An epoch is a shuffle in which each source has as many windows as its weight says. If that is the number of windows it
has, each of them comes once per epoch. Otherwise the source goes through its windows in rounds that run on from epoch
to epoch, each a shuffle of its own: no window repeats before every window of the source came once. All of this is
arithmetic on permutations of constant size, in both directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from piledriver.core.errors import UsageError
from piledriver.core.permutation import Permutation
from piledriver.core.random import Stream

Array = npt.NDArray[np.int64]


def windows_by_weight(weights: Mapping[str, float], total: int) -> dict[str, int]:
    """Return integers proportional to the weights that sum to `total` (largest remainders; ties by name).

    >>> windows_by_weight({"books": 1, "code": 2}, 10)
    {'books': 3, 'code': 7}
    """
    whole = sum(weights.values())
    if whole <= 0 or any(weight < 0 for weight in weights.values()):
        raise UsageError(f"mixture weights are {dict(weights)}", fix="give weights of 0 or more, one of them positive")
    exact = {name: total * weight / whole for name, weight in weights.items()}
    counts = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


class Mixture:
    """The order of windows over sources: `available` windows by source, of which an epoch draws `epoch_counts`.

    >>> mixture = Mixture({"books": 2, "code": 3}, {"books": 2, "code": 3}, seed=0)
    >>> sources, windows = mixture.locate(np.arange(5))
    >>> sorted(zip(sources.tolist(), windows.tolist()))
    [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    """

    def __init__(self, available: Mapping[str, int], epoch_counts: Mapping[str, int], seed: int) -> None:
        self.names = sorted(available)
        self.seed = seed
        self.available = np.array([available[name] for name in self.names], dtype=np.int64)
        self.epoch_counts = np.array([epoch_counts.get(name, 0) for name in self.names], dtype=np.int64)
        counts = zip(self.names, self.available, self.epoch_counts, strict=True)
        empty = [name for name, has, takes in counts if takes and not has]
        if empty:
            raise UsageError(
                f"source {empty[0]!r} has a weight but not one full window", fix="lower seq_len, or exclude the source"
            )
        self.edges = np.concatenate([[0], np.cumsum(self.epoch_counts)]).astype(np.int64)
        self.epoch_windows = int(self.edges[-1])
        if self.epoch_windows == 0:
            raise UsageError("an epoch has no windows", fix="lower seq_len, or exclude fewer sources")
        self._once = self.epoch_counts == self.available
        self._all_once = bool(self._once[self.epoch_counts > 0].all())

    def locate(self, indices: Array) -> tuple[Array, Array]:
        """Return (source number, window number) at each index of the endless stream."""
        epochs, places = np.divmod(indices, self.epoch_windows)
        drawn = np.empty_like(places)
        for epoch in _distinct(epochs):
            here = epochs == epoch
            drawn[here] = self._epoch_order(epoch).at(places[here])
        sources = np.searchsorted(self.edges, drawn, side="right").astype(np.int64) - 1
        windows = drawn - self.edges[sources]
        if not self._all_once:
            some = np.flatnonzero(~self._once[sources])
            draws = epochs[some] * self.epoch_counts[sources[some]] + windows[some]
            windows[some] = self._in_rounds(sources[some], draws)
        return sources, windows

    def occurrences(self, source: int, window: int, before: int) -> list[int]:
        """Return every index below `before` at which a window occurs, sorted."""
        found = []
        if self._once[source]:
            found = [(epoch, window) for epoch in range(-(-before // self.epoch_windows))]
        elif self.epoch_counts[source]:
            per_epoch, available = int(self.epoch_counts[source]), int(self.available[source])
            rounds = -(-before // self.epoch_windows) * per_epoch // available + 1
            for number in range(rounds):
                draw = number * available + self._round_order(source, number).inverse(window)
                found.append(divmod(draw, per_epoch))
        indices = (
            epoch * self.epoch_windows + self._epoch_order(epoch).inverse(int(self.edges[source]) + place)
            for epoch, place in found
        )
        return sorted(index for index in indices if index < before)

    def _in_rounds(self, sources: Array, draws: Array) -> Array:
        """Return the window of each draw, counted over all epochs, from sources that go through theirs in rounds."""
        rounds, places = np.divmod(draws, self.available[sources])
        windows = np.empty_like(places)
        for source in _distinct(sources):
            of_source = sources == source
            for number in _distinct(rounds[of_source]):
                here = of_source & (rounds == number)
                windows[here] = self._round_order(source, number).at(places[here])
        return windows

    def _epoch_order(self, epoch: int) -> Permutation:
        return _permutation(self.epoch_windows, self.seed, "epoch", epoch)

    def _round_order(self, source: int, number: int) -> Permutation:
        # "lane" names the random stream: another word would change the order of every run.
        return _permutation(int(self.available[source]), self.seed, "lane", self.names[source], number)


@lru_cache(maxsize=256)
def _permutation(length: int, seed: int, *names: str | int) -> Permutation:
    return Permutation(length, Stream(seed, "window order", *names))


def _distinct(values: Array) -> list[int]:
    # Nearly always one value: comparing the extremes is cheaper than sorting.
    if len(values) == 0:
        return []
    low, high = int(values.min()), int(values.max())
    if low == high:
        return [low]
    return [int(value) for value in np.unique(values)]
