"""`DataLoaderShard`: each process reads its own batches; `SkipDataLoader`: a loader without its first batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import default_collate, default_convert

from piledriver.data.iterable_shard import IterableDatasetShard, Marked, MarkedCollate
from piledriver.data.loader_base import (
    DataLoaderAdapter,
    DataLoaderStateMixin,
    get_sampler,
    sampler_is_batch_sampler,
    set_sampler,
    tell_epoch,
)
from piledriver.data.order import Position
from piledriver.data.processes import group_world
from piledriver.data.samplers import RemainingBatches, position_after
from piledriver.runtime.nested import send_to_device
from piledriver.runtime.seeds import synchronise_rng

_ITERATION = "piledriver_iteration"


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader of one process's batches, on the device, that can say where it is and be put there again.

    The state is the epoch and the position that all processes share: with torch's own batch sampler it can be loaded
    with another number of processes or another batch size. Over map-style data the position is entered without reading
    anything before it; an iterable dataset is entered through its own `state_dict` where it has one (without workers;
    `use_stateful_dataloader=True` where workers hold state), and else read up to the position.

    >>> loader = DataLoaderShard(list(range(6)), batch_size=2)
    >>> batches = iter(loader)
    >>> next(batches)
    tensor([0, 1])
    >>> state = loader.state_dict()
    >>> again = DataLoaderShard(list(range(6)), batch_size=2)
    >>> again.load_state_dict(state)
    >>> [batch.tolist() for batch in again]
    [[2, 3], [4, 5]]
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | None = None,
        rng_types: list[Any] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        self._original = dataset
        if isinstance(dataset, IterableDatasetShard):
            # The mask has to cross from the workers: samples are marked there and unmarked here.
            collate = kwargs.get("collate_fn")
            if collate is None:
                collate = default_convert if kwargs.get("batch_size", 1) is None else default_collate
            kwargs["collate_fn"] = MarkedCollate(collate)
            dataset = dataset.marked()
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.torch_device_mesh = torch_device_mesh
        self.iteration = iteration
        self._entry: dict[str, Any] | None = None
        self._state: dict[str, Any] | None = None

    @property
    def dataset(self) -> Any:
        """The dataset as it was given."""
        return self._original

    @property
    def collate_fn(self) -> Any:
        """The collate function as it was given."""
        inner = self.base_dataloader.collate_fn
        return inner.collate if isinstance(inner, MarkedCollate) else inner

    def __iter__(self) -> Iterator[Any]:
        entry, self._entry = self._entry, None
        if self.rng_types is not None:
            synchronise_rng(group_world(self.device or "cpu"), self.rng_types, self.synchronized_generator)
        self.begin()
        try:
            self.set_epoch(self.iteration)
            batches, taken = self._open(entry)
            valid_counts = self._valid_counts()
            batch = next(batches, _END)
            while batch is not _END:
                taken += 1
                batch, valid = _unmarked(batch, valid_counts)
                if self.device is not None:
                    batch = send_to_device(batch, self.device, self._non_blocking)
                # The loader inside runs one batch ahead of what the user sees, so its state is taken before that.
                self._remember(taken, entry)
                ahead = next(batches, _END)
                if ahead is _END:
                    self.end_of_dataloader = True
                    self._remember(taken, entry)
                self.valid_count = valid
                if taken > self.skip_batches:
                    yield batch
                batch = ahead
            self.iteration += 1
            self._state = None
        finally:
            self.end()

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch after the one in hand is."""
        if self.use_stateful_dataloader:
            state = dict(self._state if self._state is not None else cast(Any, self.base_dataloader).state_dict())
            return {**state, _ITERATION: self.iteration} if self.iteration else state
        if self._state is not None:
            return self._state
        return self._entry if self._entry is not None else self._finished(self.iteration)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there at the next iteration."""
        state = dict(state_dict)
        self._state = None
        if self.use_stateful_dataloader:
            self.iteration = state.pop(_ITERATION, 0)
            if state.get("_iterator_finished"):
                self.iteration += 1
            cast(Any, self.base_dataloader).load_state_dict(state)
            return
        self.iteration = state["iteration"]
        self._entry = state

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, for everything in the loader that shuffles by it."""
        self.iteration = epoch
        tell_epoch(self, epoch)

    @property
    def total_batch_size(self) -> int:
        """Samples in one round of batches over all processes."""
        if isinstance(self.dataset, IterableDatasetShard):
            return self.dataset.samples_per_round
        batches = self._batches
        split = getattr(batches, "split_batches", False)
        return int(batches.batch_size * (1 if split else getattr(batches, "num_processes", 1)))

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset, over all processes."""
        dataset: Any = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        return int(dataset.total_length if hasattr(dataset, "total_length") else len(dataset))

    def get_sampler(self) -> Any:
        """The sampler that the order comes from."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Give the loader another order."""
        set_sampler(self, sampler)

    @property
    def _batches(self) -> Any:
        """The batch sampler, wherever torch keeps it."""
        return self.sampler if sampler_is_batch_sampler(self) else self.batch_sampler

    def _open(self, entry: Mapping[str, Any] | None) -> tuple[Iterator[Any], int]:
        """The batches from an entry on, and how many were taken before it."""
        if entry is None or entry["batches"] == 0:
            self._load_sampler(entry)
            return iter(self.base_dataloader), 0
        if isinstance(self.base_dataloader.dataset, IterableDataset):
            return self._open_iterable(entry)
        self._load_sampler(entry)
        at = Position(batches=entry["batches"], samples=entry["samples"])
        remaining = RemainingBatches(self._batches, at)
        if sampler_is_batch_sampler(self):
            return iter(self._another(sampler=remaining, batch_size=None)), 0
        return iter(self._another(batch_sampler=remaining)), 0

    def _open_iterable(self, entry: Mapping[str, Any]) -> tuple[Iterator[Any], int]:
        source = self._stateful_dataset()
        if source is not None and entry["dataset"] is not None:
            source.load_state_dict(entry["dataset"])
            return iter(self.base_dataloader), entry["batches"]
        batches = iter(self.base_dataloader)
        for _ in range(entry["batches"]):
            next(batches, None)
        return batches, entry["batches"]

    def _remember(self, taken: int, entry: Mapping[str, Any] | None) -> None:
        if self.use_stateful_dataloader:
            self._state = cast(Any, self.base_dataloader).state_dict()
            self._state["_iterator_finished"] = self.end_of_dataloader
            return
        if self.end_of_dataloader:
            self._state = self._finished(self.iteration + 1)
            return
        iterable = isinstance(self.base_dataloader.dataset, IterableDataset)
        at = Position(batches=taken) if iterable else position_after(self._batches, taken)
        if entry is not None and not iterable:
            at = Position(batches=at.batches + entry["batches"], samples=at.samples + entry["samples"])
        source, sampler = self._stateful_dataset(), get_sampler(self)
        self._state = {
            "iteration": self.iteration,
            **asdict(at),
            "sampler": sampler.state_dict() if hasattr(sampler, "state_dict") else None,
            "dataset": source.state_dict() if source is not None else None,
        }

    def _finished(self, next_iteration: int) -> dict[str, Any]:
        sampler = get_sampler(self)
        drawn = sampler.state_dict(finished=True) if hasattr(sampler, "state_dict") else None
        return {"iteration": next_iteration, **asdict(Position()), "sampler": drawn, "dataset": None}

    def _load_sampler(self, entry: Mapping[str, Any] | None) -> None:
        sampler = get_sampler(self)
        if entry is not None and entry["sampler"] is not None and hasattr(sampler, "load_state_dict"):
            sampler.load_state_dict(entry["sampler"])

    def _stateful_dataset(self) -> Any:
        """The iterable dataset that saves its own state, where it lives in this process."""
        source = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        if self.base_dataloader.num_workers or not isinstance(source, IterableDataset):
            return None
        return source if hasattr(source, "state_dict") and hasattr(source, "load_state_dict") else None

    def _valid_counts(self) -> deque[int] | None:
        """The record that the sampler keeps of the iteration that has just begun."""
        return None if self._batches is None else getattr(self._batches, "valid_counts", None)


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that leaves out its first batches. Map-style data before them is not read.

    >>> [batch.tolist() for batch in SkipDataLoader(list(range(6)), batch_size=2, skip_batches=2)]
    [[4, 5]]
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches
        self._state: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.base_dataloader) - self.skip_batches

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            for index, batch in enumerate(self._source()):
                if index >= self._unread:
                    if self.use_stateful_dataloader:
                        self._state = cast(Any, self.base_dataloader).state_dict()
                    yield batch
        finally:
            self.end()

    def state_dict(self) -> dict[str, Any]:
        """torchdata's state, with `use_stateful_dataloader`."""
        return self._state if self._state is not None else cast(Any, self.base_dataloader).state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from torchdata's state."""
        self._state = None
        cast(Any, self.base_dataloader).load_state_dict(dict(state_dict))

    @property
    def _unread(self) -> int:
        return self.skip_batches if self._must_read else 0

    @property
    def _must_read(self) -> bool:
        iterable = isinstance(self.base_dataloader.dataset, IterableDataset)
        return iterable or self.use_stateful_dataloader or self.batch_sampler is None

    def _source(self) -> DataLoader[Any]:
        if self._must_read or not self.skip_batches:
            return self.base_dataloader
        at = position_after(self.batch_sampler, self.skip_batches)
        return self._another(batch_sampler=RemainingBatches(self.batch_sampler, at))


_END = object()


def _unmarked(batch: Any, valid_counts: deque[int] | None) -> tuple[Any, int | None]:
    if isinstance(batch, Marked):
        return batch.data, batch.valid
    return batch, valid_counts.popleft() if valid_counts else None
