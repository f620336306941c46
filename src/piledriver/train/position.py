"""Where in the data a run is: the next window, what is passed over, and the record that `piledriver trace` reads."""

from __future__ import annotations

from collections.abc import Generator
from typing import cast

from piledriver.data.record import record_stream
from piledriver.data.stream.loader import TokenBatch, TokenLoader
from piledriver.train.setup import RunComponents
from piledriver.train.spikes.rollback import SkipList


class Position:
    """The batches that this process reads, one after the other."""

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

    @property
    def window(self) -> int:
        """The next window of the endless stream."""
        return self._components.stream.index_of(self.loader.cursor)

    @property
    def passed_over(self) -> int:
        """Batches that were left out until here."""
        return self.skips.batches_before(self.window)

    def next_batch(self) -> TokenBatch:
        """The next micro-batch."""
        if self._batches is None:
            self._batches = cast(Generator[TokenBatch], iter(self.loader))
        return next(self._batches)

    def pass_over(self, step: int) -> None:
        """Before a step: go on behind what is to be left out."""
        after = self.skips.after(self.window)
        if after != self.window:
            self.go_to(after)
            self.record(step)

    def go_to(self, window: int) -> None:
        """Read on from there."""
        self.close()
        cursor = self._components.stream.advance(self._components.stream.start, window)
        self.loader.load_state_dict({"cursor": cursor.to_bytes()})

    def record(self, step: int) -> None:
        """Note where the data of the steps from here on comes from."""
        if self._components.world.is_main:
            record_stream(
                self._components.config.out,
                self._components.stream,
                windows_per_step=self._components.batching.windows_per_step,
                step=step,
                cursor=self.loader.cursor,
            )

    def close(self) -> None:
        """Stop reading ahead."""
        if self._batches is not None:
            self._batches.close()
            self._batches = None
