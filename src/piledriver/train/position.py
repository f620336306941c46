"""The position of a run in its data: next window, skipped windows, and the record that `piledriver trace` reads."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import cast

from piledriver.data.record import record_stream
from piledriver.data.stream.loader import TokenBatch, TokenLoader
from piledriver.train.setup import RunComponents
from piledriver.train.spikes.rollback import SkipList


class Position:
    """Reads the micro-batches of this rank in order."""

    def __init__(self, components: RunComponents) -> None:
        self._components = components
        self.skips = SkipList(components.config.out)
        rank, size = components.data_place
        self.loader = TokenLoader(
            components.stream,
            batch_size=components.batching.windows_per_micro_batch,
            rank=rank,
            size=size,
            device=components.device,
        )
        self._batches: Generator[TokenBatch] | None = None
        self._waited_s = 0.0

    @property
    def window(self) -> int:
        """Index of the next window in the endless stream."""
        return self._components.stream.index_of(self.loader.cursor)

    @property
    def skipped_batches(self) -> int:
        """Batches before this position that roll-backs skipped."""
        return self.skips.batches_before(self.window)

    def next_batch(self) -> TokenBatch:
        """Return the next micro-batch."""
        begun = time.monotonic()
        if self._batches is None:
            self._batches = cast(Generator[TokenBatch], iter(self.loader))
        batch = next(self._batches)
        self._waited_s += time.monotonic() - begun
        return batch

    def take_wait(self) -> float:
        """Return the seconds that `next_batch` took since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def skip_windows(self, step: int) -> None:
        """Before a step: move past the windows that are to be skipped."""
        after = self.skips.after(self.window)
        if after != self.window:
            self.seek(after)
            self.record(step)

    def seek(self, window: int) -> None:
        """Continue reading from this window."""
        self.close()
        cursor = self._components.stream.advance(self._components.stream.start, window)
        self.loader.load_state_dict({"cursor": cursor.to_bytes()})

    def record(self, step: int) -> None:
        """Record which windows the steps from this one on read."""
        if self._components.world.is_main:
            record_stream(
                self._components.config.out,
                self._components.stream,
                windows_per_step=self._components.batching.windows_per_step,
                step=step,
                cursor=self.loader.cursor,
            )

    def close(self) -> None:
        """Stop prefetching."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None
