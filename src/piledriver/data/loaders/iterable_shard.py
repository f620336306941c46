"""Shard of an iterable dataset for one rank, with its padding counted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from copy import copy
from itertools import cycle, islice
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import IterableDataset


class Marked(NamedTuple):
    """A sample or a batch from a worker, with the number of real samples in it."""

    data: Any
    valid: int


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of an iterable dataset that one rank uses; every rank iterates over all of them.

    Samples come in rounds of one batch per rank (or one batch split between ranks). An incomplete last round is
    dropped, or padded with samples of the first round. With `mark` each sample says whether it is real, which is how
    the count gets from worker processes to the loader.

    >>> class Ten(IterableDataset):
    ...     def __iter__(self): return iter(range(10))
    >>> list(IterableDatasetShard(Ten(), batch_size=4, num_processes=2, process_index=1))
    [4, 5, 6, 7, 2, 3, 4, 5]
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        batch_size: int | None = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        *,
        mark: bool = False,
    ) -> None:
        if split_batches and batch_size is not None and batch_size > 1 and batch_size % num_processes != 0:
            raise ValueError(
                f"with split_batches the batch size ({batch_size}) must be a round multiple of the number of "
                f"processes ({num_processes})"
            )
        self.dataset = dataset
        self.batch_size = batch_size or 1
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.mark = mark
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of a dataset that shuffles by it."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        rounds = len(cast(Any, self.dataset)) / self.samples_per_round
        return (math.floor(rounds) if self.drop_last else math.ceil(rounds)) * self._width

    def marked(self) -> IterableDatasetShard:
        """Return a copy of this shard with marked samples."""
        twin = copy(self)
        twin.mark = True
        return twin

    @property
    def samples_per_round(self) -> int:
        """Samples of one batch on every rank."""
        return self._width * self.num_processes

    @property
    def _width(self) -> int:
        return max(1, self.batch_size // self.num_processes) if self.split_batches else self.batch_size

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            # Every rank has to draw the same order.
            generator.manual_seed(self.epoch)
        start, stop = self.process_index * self._width, (self.process_index + 1) * self._width
        walk = iter(self.dataset)
        first: list[Any] = []
        while samples := list(islice(walk, self.samples_per_round)):
            first = first or samples.copy()
            real = len(samples)
            if real < self.samples_per_round:
                if self.drop_last:
                    return
                samples += islice(cycle(first), self.samples_per_round - real)
            for place in range(start, stop):
                yield Marked(samples[place], int(place < real)) if self.mark else samples[place]


class MarkedCollate:
    """Collate function for marked samples, which returns a marked batch. Picklable for workers."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Marked:
        """Collate the samples and sum their marks."""
        if isinstance(samples, Marked):
            return Marked(self.collate(samples.data), samples.valid)
        return Marked(self.collate([sample.data for sample in samples]), sum(sample.valid for sample in samples))
