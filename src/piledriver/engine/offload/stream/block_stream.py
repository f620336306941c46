"""`BlockStream`: fetch the blocks that come next while one computes, forward or backward.

The order is learned: what followed a block the last time is fetched after it, and the first block follows the last one,
so that the link stays busy between passes. The number of blocks ahead comes from measured times (`depth.py`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from piledriver.core.errors import PiledriverError
from piledriver.engine.offload.stream.depth import choose_depth
from piledriver.engine.offload.tier import Tier

# Passes before the depth is chosen, and between later choices: the first one also compiles and warms up.
_FIRST_CHOICE, _LATER_CHOICES = 2, 64
_FAR_SLOWER = 0.4
NOTICEABLE_SECONDS = 0.5
"""Of a pass over all blocks: shorter ones are dominated by latency, and no rate is expected of them."""
FORWARD, BACKWARD = 1, -1


class StreamError(PiledriverError, RuntimeError):
    """Weights that cannot be brought to the device."""


class SlowDiskWarning(UserWarning):
    """Weights arrive much more slowly than expected."""


class StreamedBlock(Protocol):
    """A block whose weights are on the device only around its use."""

    name: str
    nbytes: int
    tier: Tier

    def fetch(self) -> bool:
        """Start to bring the weights; return False if there is no memory for them now."""

    def wait(self) -> None:
        """Make the weights usable by what is computed next."""

    def evict(self) -> None:
        """Give the device memory back after what was computed so far; also of weights still on their way."""

    def fetch_seconds(self) -> float | None:
        """Return how long the last fetch took; None if not known yet."""


class BlockStream:
    """Blocks in the order of their use. Call `need` before a block computes and `done` after it."""

    def __init__(
        self,
        blocks: Sequence[StreamedBlock],
        device: torch.device,
        *,
        depth: int = 1,
        deepest: int = 4,
        cyclic: bool = True,
        make_room: Callable[[int], bool] | None = None,
    ) -> None:
        """Stream `blocks`; `make_room(depth)` provides memory for blocks ahead and returns whether it could.

        With `cyclic`, the first block is fetched during the last one. Without, a pass ends with its last block: weights
        may change before the next one.
        """
        self.blocks = list(blocks)
        self.device = device
        self.depth, self.deepest, self.cyclic = depth, deepest, cyclic
        self._make_room = make_room
        self._here: set[int] = set()
        self._uses = [0] * len(self.blocks)
        self._next = {way: [self._after(i, way) for i in range(len(self.blocks))] for way in (FORWARD, BACKWARD)}
        self._last: tuple[int, int] | None = None
        self._passes = 0
        self._started: dict[tuple[int, int], Any] = {}
        self._ended: dict[tuple[int, int], Any] = {}
        self.waited_seconds = 0.0
        """How long the host waited for weights; on a GPU, for disk reads only."""
        self.expected_rates: dict[Tier, float] = {}
        """Bytes per second by tier; much slower arrivals are a `SlowDiskWarning`."""

    def _after(self, number: int, way: int) -> int | None:
        found, count = number + way, len(self.blocks)
        return found % count if self.cyclic or 0 <= found < count else None

    def need(self, number: int, way: int = FORWARD) -> None:
        """Make a block's weights usable and start fetching those that come next in this direction."""
        if self._uses[number]:
            self._uses[number] += 1
            return
        self._learn(number, way)
        self._uses[number] = 1
        begun = time.perf_counter()
        try:
            self._fetch_now(number)
            self._ahead(number, way, self.depth)
            begun = time.perf_counter()
            self.blocks[number].wait()
        except BaseException:
            self._uses[number] = 0
            self.evict_unused()
            raise
        self.waited_seconds += time.perf_counter() - begun
        self._started[number, way] = self._mark()

    def done(self, number: int, way: int = FORWARD) -> None:
        """Give a block's memory back and use it for those that come next."""
        if not self._uses[number]:  # `need` has failed
            return
        self._uses[number] -= 1
        if self._uses[number]:
            return
        self._ended[number, way] = self._mark()
        self.blocks[number].evict()
        self._here.discard(number)
        # The memory of this block now serves one more ahead.
        self._ahead(number, way, self.depth + 1)

    def evict_unused(self) -> None:
        """Give back the memory of blocks that were fetched and are not in use."""
        for number in [one for one in self._here if not self._uses[one]]:
            self.blocks[number].evict()
            self._here.discard(number)

    def release_all(self) -> None:
        """Give back the memory of all blocks, also of those in use: their weights change, or a pass has failed."""
        self._uses = [0] * len(self.blocks)
        self._last = None
        for block in self.blocks:
            block.evict()
        self._here.clear()

    def measured_rate(self, tier: Tier) -> float | None:
        """Return the bytes per second at which blocks of a tier last arrived; None before any has."""
        found = [(b.nbytes, seconds) for b in self.blocks if b.tier == tier and (seconds := b.fetch_seconds())]
        total = sum(seconds for _, seconds in found)
        return sum(size for size, _ in found) / total if total else None

    def _fetch(self, number: int) -> bool:
        try:
            if not self.blocks[number].fetch():
                return False
        except BaseException:
            self.blocks[number].evict()
            raise
        self._here.add(number)
        return True

    def _fetch_now(self, number: int) -> None:
        if number in self._here or self._fetch(number):
            return
        self.evict_unused()
        if not self._fetch(number):
            block = self.blocks[number]
            raise StreamError(
                f"there is no memory on {self.device} for the {block.nbytes / 2**20:,.0f} MiB of {block.name}",
                fix="lower max_memory of this device in the device map, the batch or the length",
            )

    def _ahead(self, number: int, way: int, count: int) -> None:
        at: int | None = number
        for _ in range(count):
            at = None if at is None else self._next[way][at]
            if at is None or at == number:
                return
            try:
                if at not in self._here and not self._fetch(at):
                    return
            except PiledriverError:  # raised again when the block is needed
                return

    def _learn(self, number: int, way: int) -> None:
        if self._last is not None:
            last, last_way = self._last
            if last_way == way and (self.cyclic or (number - last) * way > 0):
                self._next[way][last] = number
        self._last = number, way
        if number == 0 and way == FORWARD:
            self._passes += 1
            if self._passes == _FIRST_CHOICE + 1 or self._passes % _LATER_CHOICES == 0:
                self._choose()

    def _choose(self) -> None:
        """Choose the depth from the times of the last pass, and warn of a disk that is far slower than expected."""
        visits = [(i, FORWARD) for i in range(len(self.blocks))]
        visits += [(i, BACKWARD) for i, _ in reversed(visits) if (i, BACKWARD) in self._ended]
        fetch = [self.blocks[i].fetch_seconds() for i, _ in visits]
        compute = [self._between(visit) for visit in visits]
        if self.deepest and all(one is not None for one in (*fetch, *compute)):
            depth = choose_depth(fetch, compute, min(self.deepest, len(self.blocks) - 1))  # type: ignore[arg-type]
            if depth <= self.depth or self._room(depth):
                self.depth = depth
        for tier, expected in list(self.expected_rates.items()):
            rate = self.measured_rate(tier)
            seconds = sum(block.fetch_seconds() or 0.0 for block in self.blocks if block.tier == tier)
            if rate is not None and rate < _FAR_SLOWER * expected and seconds >= NOTICEABLE_SECONDS:
                del self.expected_rates[tier]
                warnings.warn(
                    f"weights on {tier.value} arrive at {rate / 1e6:,.0f} MB/s, {expected / 1e6:,.0f} MB/s were "
                    "expected: another process may use it, or the folder is on a slow disk",
                    SlowDiskWarning,
                    stacklevel=4,
                )

    def _room(self, depth: int) -> bool:
        if self._make_room is None or any(self._uses[one] for one in self._here):
            return False
        self.evict_unused()
        return self._make_room(depth)

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _between(self, visit: tuple[int, int]) -> float | None:
        start, end = self._started.get(visit), self._ended.get(visit)
        if start is None or end is None:
            return None
        if isinstance(start, float):
            return float(end - start)
        return start.elapsed_time(end) / 1000 if end.query() and start.query() else None
