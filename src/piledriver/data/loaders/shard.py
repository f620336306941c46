"""`DataLoaderShard`: each rank reads its own batches; `SkipDataLoader`: a loader without its first batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import default_collate, default_convert

from piledriver.data.loaders.base import DataLoaderAdapter, DataLoaderStateMixin
from piledriver.data.loaders.iterable_shard import IterableDatasetShard, Marked, MarkedCollate
from piledriver.data.loaders.samplers.batch import RemainingBatches, padding_of, position_after
from piledriver.data.loaders.samplers.position import SamplerPosition
from piledriver.runtime.collectives.nested import send_to_device
from piledriver.runtime.seeds import synchronise_rng
from piledriver.runtime.world import group_world

_ITERATION = "piledriver_iteration"


class DataLoaderShard(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader of one rank's batches, moved to its device, with a resumable position.

    The state is the epoch and the position that all ranks share: with torch's own batch sampler it can be loaded with
    another world size or batch size. Map-style data before the position is not read. An iterable dataset resumes
    through its own `state_dict` if it has one (without workers; `use_stateful_dataloader=True` if workers hold state),
    otherwise it is read up to the position.

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
            # Workers mark samples as real or padding; the loader removes the marks.
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
        self._at: tuple[int, Mapping[str, Any] | None, bool] | None = None
        self._state: dict[str, Any] | None = None

    @property
    def dataset(self) -> Any:
        """The original dataset."""
        return self._original

    @property
    def collate_fn(self) -> Any:
        """The original collate function."""
        inner = self.base_dataloader.collate_fn
        return inner.collate if isinstance(inner, MarkedCollate) else inner

    def __iter__(self) -> Iterator[Any]:
        entry, self._entry, self._rest = self._entry, None, None
        if self.rng_types is not None:
            synchronise_rng(group_world(self.device or "cpu"), self.rng_types, self.synchronized_generator)
        self.begin()
        try:
            self.set_epoch(self.iteration)
            batches = self._iterate_from(entry)
            padding = padding_of(self._batches)
            moving = self.use_stateful_dataloader or self._stateful_dataset() is not None
            taken = 0
            batch = next(batches, _END)
            while batch is not _END:
                taken += 1
                marked = batch.valid if isinstance(batch, Marked) else None
                batch = batch.data if isinstance(batch, Marked) else batch
                if self.device is not None:
                    batch = send_to_device(batch, self.device, self._non_blocking)
                # The wrapped loader runs one batch ahead of the caller, so its state is taken first.
                self._record(taken, entry, moving)
                ahead = next(batches, _END)
                self.valid_count = marked
                if ahead is _END:
                    self.end_of_dataloader = True
                    self._record(taken, entry, moving)
                    if padding is not None:
                        self.valid_count = padding.valid
                if taken > self.skip_batches:
                    yield batch
                batch = ahead
            self._finish_epoch(self.iteration + 1)
            self._at = self._state = None
        finally:
            self.end()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the current batch."""
        if self._rest is not None:
            return self._rest.state_dict()  # type: ignore[no-any-return]
        if self.use_stateful_dataloader:
            state = self._state if self._state is not None else dict(cast(Any, self.base_dataloader).state_dict())
            return {**state, _ITERATION: self.iteration} if self.iteration else state
        if self._state is not None:
            return self._state
        if self._at is not None:
            return self._state_after(*self._at)
        return self._entry or self._saved_position(self.iteration, self._position(self.skip_batches, None))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a saved position at the next iteration."""
        state = dict(state_dict)
        self._at = self._state = self._rest = None
        if self.use_stateful_dataloader:
            self.iteration = state.pop(_ITERATION, 0)
            if state.get("_iterator_finished"):
                self.iteration += 1
            cast(Any, self.base_dataloader).load_state_dict(state)
            return
        self.iteration = state["iteration"]
        self._entry = state

    @property
    def total_batch_size(self) -> int:
        """Samples in one round of batches over all ranks."""
        if isinstance(self.dataset, IterableDatasetShard):
            return self.dataset.samples_per_round
        batches = self._batches
        split = getattr(batches, "split_batches", False)
        return int(batches.batch_size * (1 if split else getattr(batches, "num_processes", 1)))

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset, over all ranks."""
        dataset: Any = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        return int(dataset.total_length if hasattr(dataset, "total_length") else len(dataset))

    def _record(self, taken: int, entry: Mapping[str, Any] | None, moving: bool) -> None:
        """Record the position: as a state if the source is about to advance, else as what a state is made from."""
        self._at = (taken, entry, self.end_of_dataloader)
        self._state = self._state_after(*self._at) if moving else None

    def _state_after(self, taken: int, entry: Mapping[str, Any] | None, finished: bool) -> dict[str, Any]:
        if self.use_stateful_dataloader:
            return {**cast(Any, self.base_dataloader).state_dict(), "_iterator_finished": finished}
        if finished:
            return self._saved_position(self.iteration + 1, SamplerPosition())
        return self._saved_position(self.iteration, self._position(taken, entry))


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that skips its first batches. Map-style data in them is not read.

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
        """Return torchdata's state; needs `use_stateful_dataloader`."""
        return self._state if self._state is not None else cast(Any, self.base_dataloader).state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from torchdata's state."""
        self._state = None
        cast(Any, self.base_dataloader).load_state_dict(dict(state_dict))

    @property
    def _unread(self) -> int:
        return self.skip_batches if self._must_read else 0

    @property
    def _must_read(self) -> bool:
        return self._is_iterable or self.use_stateful_dataloader or self.batch_sampler is None

    def _source(self) -> DataLoader[Any]:
        if self._must_read or not self.skip_batches:
            return self.base_dataloader
        at = position_after(self.batch_sampler, self.skip_batches)
        return self._loader_with(RemainingBatches(self.batch_sampler, at))


_END = object()
