"""Which window stands where: order = f(seed, epoch, index), with the mixture exact over an epoch.

An epoch is a shuffle of slots. Each source (a *lane*) owns as many slots of every epoch as its weight says. A lane with
as many slots as it has windows shows each of them once an epoch. A lane with fewer or more goes through its windows in
rounds that run on from epoch to epoch: each round is a shuffle of its own, so no window comes a second time before
every window of the lane came once. All of it is arithmetic on permutations of constant size, forwards and backwards.
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


def slots_by_weight(weights: Mapping[str, float], total: int) -> dict[str, int]:
    """Whole numbers that add up to `total` and are nearest to the weights (largest remainders; ties by name).

    >>> slots_by_weight({"books": 1, "code": 2}, 10)
    {'books': 3, 'code': 7}
    """
    whole = sum(weights.values())
    if whole <= 0 or any(weight < 0 for weight in weights.values()):
        raise UsageError("mixture weights must not be negative, and one must be positive", fix="give a source a weight")
    exact = {name: total * weight / whole for name, weight in weights.items()}
    counts = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


class Mixture:
    """The order of windows over lanes.

    >>> mixture = Mixture({"books": 2, "code": 3}, {"books": 2, "code": 3}, seed=0)
    >>> lanes, windows = mixture.locate(np.arange(5))
    >>> sorted(zip(lanes.tolist(), windows.tolist()))
    [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    """

    def __init__(self, windows: Mapping[str, int], slots: Mapping[str, int], seed: int) -> None:
        self.names = sorted(windows)
        self.seed = seed
        self.windows = np.array([windows[name] for name in self.names], dtype=np.int64)
        self.slots = np.array([slots.get(name, 0) for name in self.names], dtype=np.int64)
        empty = [n for n, w, s in zip(self.names, self.windows, self.slots, strict=True) if s and not w]
        if empty:
            raise UsageError(
                f"source {empty[0]!r} has a weight but not one whole window", fix="use shorter windows, or leave it out"
            )
        self.edges = np.concatenate([[0], np.cumsum(self.slots)]).astype(np.int64)
        self.epoch_windows = int(self.edges[-1])
        if self.epoch_windows == 0:
            raise UsageError("an epoch has no windows", fix="use shorter windows, or leave out fewer sources")
        self._natural = self.slots == self.windows
        self._all_natural = bool(self._natural[self.slots > 0].all())

    def locate(self, indices: Array) -> tuple[Array, Array]:
        """(lane, window) at each index of the endless stream."""
        epochs, places = np.divmod(indices, self.epoch_windows)
        slots = np.empty_like(places)
        for epoch in _distinct(epochs):
            here = epochs == epoch
            slots[here] = self._epoch_order(epoch).at(places[here])
        lanes = np.searchsorted(self.edges, slots, side="right").astype(np.int64) - 1
        windows = slots - self.edges[lanes]
        if not self._all_natural:
            drawn = np.flatnonzero(~self._natural[lanes])
            windows[drawn] = self._draw(lanes[drawn], epochs[drawn] * self.slots[lanes[drawn]] + windows[drawn])
        return lanes, windows

    def occurrences(self, lane: int, window: int, before: int) -> list[int]:
        """Every index under `before` at which a window stands, in order."""
        found = []
        if self._natural[lane]:
            found = [(epoch, window) for epoch in range(-(-before // self.epoch_windows))]
        elif self.slots[lane]:
            rounds = -(-before // self.epoch_windows) * int(self.slots[lane]) // int(self.windows[lane]) + 1
            for number in range(rounds):
                draw = number * int(self.windows[lane]) + self._round_order(lane, number).inverse(window)
                found.append(divmod(draw, int(self.slots[lane])))
        indices = (
            epoch * self.epoch_windows + self._epoch_order(epoch).inverse(int(self.edges[lane]) + place)
            for epoch, place in found
        )
        return sorted(index for index in indices if index < before)

    def _draw(self, lanes: Array, draws: Array) -> Array:
        rounds, places = np.divmod(draws, self.windows[lanes])
        windows = np.empty_like(places)
        for lane in _distinct(lanes):
            in_lane = lanes == lane
            for number in _distinct(rounds[in_lane]):
                here = in_lane & (rounds == number)
                windows[here] = self._round_order(lane, number).at(places[here])
        return windows

    def _epoch_order(self, epoch: int) -> Permutation:
        return _permutation(self.epoch_windows, self.seed, "epoch", epoch)

    def _round_order(self, lane: int, number: int) -> Permutation:
        return _permutation(int(self.windows[lane]), self.seed, "lane", self.names[lane], number)


@lru_cache(maxsize=256)
def _permutation(length: int, seed: int, *names: str | int) -> Permutation:
    return Permutation(length, Stream(seed, "window order", *names))


def _distinct(values: Array) -> list[int]:
    # Nearly always one value: looking at the ends is cheaper than sorting.
    if len(values) == 0:
        return []
    low, high = int(values.min()), int(values.max())
    if low == high:
        return [low]
    return [int(value) for value in np.unique(values)]
