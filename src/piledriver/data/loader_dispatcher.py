"""`DataLoaderDispatcher`: the main process reads, every process gets its part of what was read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch

from piledriver.data.loader_base import DataLoaderAdapter, DataLoaderStateMixin, get_sampler, set_sampler, tell_epoch
from piledriver.data.processes import share_batch, this_process
from piledriver.data.rows import join_rows, take_rows
from piledriver.runtime.nested import find_batch_size, send_to_device


class DataLoaderDispatcher(DataLoaderAdapter, DataLoaderStateMixin):
    """A loader that only the main process iterates over; the batches are broadcast and cut into equal parts.

    With `split_batches` one batch is cut, otherwise as many batches as there are processes are joined first. An
    incomplete last round is filled up with samples from the first one, and `valid_count` says what is real.

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
        self.process_index, self.num_processes = this_process()
        self._entry = 0
        self._state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        taken, self._entry = self._entry, 0
        skip = max(self.skip_batches, taken)
        self.begin()
        try:
            self.set_epoch(self.iteration)
            rounds = self._rounds() if self.process_index == 0 else iter(())
            first: Any = None
            index = 0
            batch, more = self._share(next(rounds, None))
            while batch is not None:
                if first is None:
                    first = batch
                index += 1
                self._remember(index)
                # One round ahead, to know the last one when it is handed out.
                ahead, more = self._share(next(rounds, None)) if more else (None, False)
                if ahead is None:
                    self.end_of_dataloader = True
                    self._remember(index)
                if index > skip:
                    yield self._my_part(batch, first)
                batch = ahead
            self.iteration += 1
            self._state = None
        finally:
            self.end()

    def __len__(self) -> int:
        batches = len(self.base_dataloader)
        if self.split_batches:
            return batches
        return (math.floor if self._drop_last else math.ceil)(batches / self.num_processes)

    def state_dict(self) -> dict[str, Any]:
        """Where the next round after the one in hand is."""
        if self.use_stateful_dataloader:
            return self._state if self._state is not None else cast(Any, self.base_dataloader).state_dict()
        return self._state or {"iteration": self.iteration, "rounds": self._entry}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there at the next iteration."""
        self._state = None
        if self.use_stateful_dataloader:
            cast(Any, self.base_dataloader).load_state_dict(dict(state_dict))
            return
        self.iteration, self._entry = state_dict["iteration"], state_dict["rounds"]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, for everything in the loader that shuffles by it."""
        self.iteration = epoch
        tell_epoch(self, epoch)

    @property
    def total_batch_size(self) -> int:
        """Samples in one round over all processes."""
        size = cast(int, self.batch_sampler.batch_size if self.batch_sampler is not None else self.batch_size)
        return size if self.split_batches else size * self.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset."""
        return len(self.dataset)

    def get_sampler(self) -> Any:
        """The sampler that the order comes from."""
        return get_sampler(self)

    def set_sampler(self, sampler: Any) -> None:
        """Give the loader another order."""
        set_sampler(self, sampler)

    def _rounds(self) -> Iterator[tuple[Any, dict[str, Any] | None]]:
        """On the main process: what all processes share next, with torchdata's state after it."""
        per_round = 1 if self.split_batches else self.num_processes
        parts: list[Any] = []
        for batch in self.base_dataloader:
            parts.append(batch)
            if len(parts) == per_round:
                yield self._joined(parts), self._base_state()
                parts = []
        if parts and not self._drop_last:
            yield self._joined(parts), self._base_state()

    def _base_state(self) -> dict[str, Any] | None:
        return cast(Any, self.base_dataloader).state_dict() if self.use_stateful_dataloader else None

    def _joined(self, parts: list[Any]) -> Any:
        try:
            return parts[0] if len(parts) == 1 else join_rows(parts)
        except RuntimeError as error:
            raise ValueError(
                "batches of different shapes cannot be joined for dispatch; use split_batches=True, or "
                "dispatch_batches=False so that each process reads its own"
            ) from error

    def _share(self, round_: tuple[Any, dict[str, Any] | None] | None) -> tuple[Any, bool]:
        batch, state = round_ if round_ is not None else (None, None)
        if batch is not None:
            batch = send_to_device(batch, self.device, self._non_blocking)
        batch, (found, self._shared_state) = share_batch(batch, (round_ is not None, state), self.device)
        return (batch, True) if found else (None, False)

    def _remember(self, rounds: int) -> None:
        if self.use_stateful_dataloader:
            self._state = {**(self._shared_state or {}), "_iterator_finished": self.end_of_dataloader}
        elif self.end_of_dataloader:
            self._state = {"iteration": self.iteration + 1, "rounds": 0}
        else:
            self._state = {"iteration": self.iteration, "rounds": rounds}

    def _my_part(self, batch: Any, first: Any) -> Any:
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
