"""`DataLoaderDispatcher`: the main process reads and broadcasts; every rank takes its part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, cast

import torch

from piledriver.data.loaders.base import DataLoaderAdapter, DataLoaderStateMixin
from piledriver.data.loaders.process_group import broadcast_batch, current_rank
from piledriver.data.loaders.samplers.position import SamplerPosition
from piledriver.runtime.collectives.nested import (
    find_batch_size,
    rebuild_mapping,
    rebuild_sequence,
    send_to_device,
    tensors,
)


class DataLoaderDispatcher(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that only the main process iterates over; batches are broadcast and split evenly between ranks.

    With `split_batches` one batch is split, otherwise one batch per rank is read and they are concatenated first. An
    incomplete last round is padded with samples of the first one, and `valid_count` counts the real ones.

    >>> [batch.tolist() for batch in DataLoaderDispatcher(range(5), batch_size=2)]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        device: torch.device | str = "cpu",
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.split_batches = split_batches
        self.skip_batches = skip_batches
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.slice_fn = slice_fn if slice_fn is not None else take_rows
        self.torch_device_mesh = torch_device_mesh
        self.iteration = iteration
        self.device = device
        self.process_index, self.num_processes = current_rank()
        self._state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        entry, self._entry, self._rest = self._entry, None, None
        self.begin()
        try:
            self.set_epoch(self.iteration)
            rounds = self._rounds(entry) if self.process_index == 0 else iter(())
            first: Any = None
            index = 0
            batch, state = self._share(next(rounds, None))
            while batch is not None:
                first = batch if first is None else first
                index += 1
                self._state = state
                # Read one round ahead, to know which one is the last.
                ahead, state = self._share(next(rounds, None))
                if ahead is None:
                    self.end_of_dataloader = True
                    self._state = state
                if index > self.skip_batches:
                    yield self._own_part(batch, first)
                batch = ahead
            self._finish_epoch(self.iteration + 1)
        finally:
            self.end()

    def __len__(self) -> int:
        batches = len(self.base_dataloader)
        if self.split_batches:
            return batches
        return (math.floor if self._drop_last else math.ceil)(batches / self.num_processes)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the current round; the same on every rank."""
        if self._rest is not None:
            return self._rest.state_dict()  # type: ignore[no-any-return]
        if self._state is not None:
            return self._state
        if self.use_stateful_dataloader:
            return dict(cast(Any, self.base_dataloader).state_dict())
        return self._entry or self._saved_position(self.iteration, self._position(self.skip_batches, None))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from a saved position at the next iteration."""
        self._state = self._rest = None
        if self.use_stateful_dataloader:
            # Until the next batch this is the state; torchdata would read up to it to return the same.
            self._state = dict(state_dict)
            cast(Any, self.base_dataloader).load_state_dict(dict(state_dict))
            return
        self._entry = dict(state_dict)
        self.iteration = self._entry["iteration"]

    @property
    def total_batch_size(self) -> int:
        """Samples in one round over all ranks."""
        size = cast(int, self.batch_sampler.batch_size if self.batch_sampler is not None else self.batch_size)
        return size if self.split_batches else size * self.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset."""
        return len(self.dataset)

    def _rounds(self, entry: Mapping[str, Any] | None) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield each round with the position after it, at the end None with the final one. Main process only."""
        per_round = 1 if self.split_batches else self.num_processes
        parts: list[Any] = []
        for taken, batch in enumerate(self._iterate_from(entry), 1):
            parts.append(batch)
            if len(parts) == per_round:
                yield self._concatenate(parts), self._state_at(self._position(taken, entry))
                parts = []
        finished = self._state_at(None)
        if parts and not self._drop_last:
            yield self._concatenate(parts), finished
        yield None, finished

    def _state_at(self, at: SamplerPosition | None) -> dict[str, Any]:
        if self.use_stateful_dataloader:
            return {**cast(Any, self.base_dataloader).state_dict(), "_iterator_finished": at is None}
        return (
            self._saved_position(self.iteration, at)
            if at
            else self._saved_position(self.iteration + 1, SamplerPosition())
        )

    def _concatenate(self, parts: list[Any]) -> Any:
        try:
            return parts[0] if len(parts) == 1 else join_rows(parts)
        except RuntimeError as error:
            raise ValueError(
                "batches of different shapes cannot be concatenated for dispatch; use split_batches=True, or "
                "dispatch_batches=False so that each process reads its own"
            ) from error

    def _share(self, round_: tuple[Any, dict[str, Any]] | None) -> tuple[Any, dict[str, Any]]:
        batch, state = round_ if round_ is not None else (None, None)
        if batch is not None:
            batch = send_to_device(batch, self.device, self._non_blocking)
        return broadcast_batch(batch, state, self.device)

    def _own_part(self, batch: Any, first: Any) -> Any:
        observed = find_batch_size(batch)
        if observed is None:
            raise ValueError("a batch without tensors cannot be dispatched; use dispatch_batches=False")
        if self.end_of_dataloader:
            self.remainder = observed
        width = math.ceil(observed / self.num_processes)
        missing = width * self.num_processes - observed
        if missing:
            fill = [first] * math.ceil(missing / cast(int, find_batch_size(first)))
            batch = join_rows([batch, *fill])
        start = width * self.process_index
        self.valid_count = max(0, min(width, observed - start)) if missing else None
        part = slice(start, start + width)
        return self.slice_fn(batch, part, process_index=self.process_index, num_processes=self.num_processes)


def take_rows(batch: Any, part: slice, process_index: int = 0, num_processes: int = 1) -> Any:
    """Return a slice of every tensor, and of every plain list that has one item per sample.

    `process_index` and `num_processes` are unused: a user's own `slice_fn` receives them.

    >>> take_rows({"x": torch.arange(4), "names": ["a", "b", "c", "d"], "split": "train"}, slice(1, 3))
    {'x': tensor([1, 2]), 'names': ['b', 'c'], 'split': 'train'}
    """
    return _take(batch, part, find_batch_size(batch))


def _take(data: Any, part: slice, rows: int | None) -> Any:
    if isinstance(data, torch.Tensor):
        return data[part] if data.ndim else data
    if isinstance(data, Mapping):
        return rebuild_mapping(data, {key: _take(value, part, rows) for key, value in data.items()})
    if isinstance(data, (list, tuple)):
        if _is_column(data):
            return data[part] if len(data) == rows else data
        return rebuild_sequence(data, (_take(item, part, rows) for item in data))
    return data


def join_rows(batches: list[Any]) -> Any:
    """Concatenate batches of the same structure."""
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(batches) if first.ndim else first
    if isinstance(first, Mapping):
        return rebuild_mapping(first, {key: join_rows([batch[key] for batch in batches]) for key in first})
    if isinstance(first, (list, tuple)):
        if _is_column(first):
            return type(first)(chain.from_iterable(batches))
        return rebuild_sequence(first, (join_rows(list(items)) for items in zip(*batches, strict=True)))
    return first


def _is_column(data: Any) -> bool:
    """Return whether a sequence holds one plain value per sample (names, ids) rather than parts of a batch."""
    return not hasattr(data, "_fields") and next(tensors(data), None) is None
