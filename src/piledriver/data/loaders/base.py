"""Base classes of prepared loaders: they delegate to the torch loader that they wrap, and track their position.

A prepared loader wraps a torch `DataLoader` (or torchdata's `StatefulDataLoader`) instead of inheriting from it, so
that one class serves both. `isinstance` still answers for the wrapped loader, because users' code asks that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any, Protocol, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from piledriver.core.lazy import import_optional
from piledriver.data.loaders.iterable_shard import IterableDatasetShard
from piledriver.data.loaders.samplers.batch import RemainingBatches, position_after
from piledriver.data.loaders.samplers.position import SamplerPosition
from piledriver.data.loaders.samplers.random import ReplayableRandomSampler

# Keyword arguments of DataLoader that a prepared loader copies from the original one.
COPIED_ARGUMENTS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


class LoaderListener(Protocol):
    """Callbacks at the start and end of an iteration (gradient accumulation syncs at a loader's end)."""

    def loader_began(self, loader: Any) -> None:
        """Called when an iteration begins; of nested loops, the innermost begins last."""

    def loader_ended(self, loader: Any) -> None:
        """Called when an iteration ends, also early."""


class DataLoaderStateMixin:
    """State of an iteration: whether this is the last batch, and how many of its samples are real."""

    end_of_dataloader: bool = False
    """Whether the current batch is the last one of the epoch."""
    remainder: int = -1
    """Samples in the last round over all ranks; -1 if unknown, 0 if it is full."""
    valid_count: int | None = None
    """Real samples at the front of the current batch, the others are padding; None if every sample is real."""
    gradient_state: LoaderListener | None = None
    """Called when an iteration begins and ends."""
    _drop_last: bool = False

    def reset(self) -> None:
        """Reset the state of the last iteration."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.valid_count = None

    def begin(self) -> None:
        """Begin an iteration."""
        self.reset()
        if not self._drop_last:
            self.remainder = self._expected_remainder()
        if self.gradient_state is not None:
            self.gradient_state.loader_began(self)

    def end(self) -> None:
        """End an iteration."""
        if self.gradient_state is not None:
            self.gradient_state.loader_ended(self)

    def valid_mask(self, batch_size: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Return a mask of the current batch: true for real samples, false for padding."""
        count = batch_size if self.valid_count is None else self.valid_count
        return torch.arange(batch_size, device=device) < count

    def _expected_remainder(self) -> int:
        try:
            return int(self.total_dataset_length % self.total_batch_size)  # type: ignore[attr-defined]
        except (TypeError, AttributeError, NotImplementedError, ZeroDivisionError):
            # A dataset without a length or a batch sampler without a batch size: known only at the end.
            return -1


class DataLoaderAdapter:
    """Wraps a loader and delegates to it."""

    iteration: int = 0
    """The epoch that is read, or is read next."""
    _entry: dict[str, Any] | None = None
    """Saved position at which the next iteration begins."""
    _rest: Any = None
    """The copy that `skip_first_batches` made to finish this epoch: its position is this loader's."""
    _skips_for: Any = None
    """The loader that this one is a copy of."""
    _resumes: bool = False
    """Whether this one finishes an epoch that another process began."""

    def __init__(
        self,
        dataset: Any,
        use_stateful_dataloader: bool = False,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        kind = _stateful_kind() if use_stateful_dataloader else DataLoader
        if batch_sampler is not None:
            kwargs["batch_sampler"] = batch_sampler
        self._arguments = kwargs
        self.base_dataloader = kind(dataset, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("base_dataloader", "_arguments"):
            # While unpickling: do not recurse.
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return self.base_dataloader.__class__

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.base_dataloader)

    def __reduce__(self) -> tuple[Any, ...]:
        # The default uses __class__, which is that of the wrapped loader.
        return _restore, (type(self), self.__dict__.copy())

    def get_sampler(self) -> Any:
        """Return the sampler that the order of samples comes from."""
        return get_sampler(self.base_dataloader)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler that the order of samples comes from."""
        self._batches.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of every sampler and dataset that shuffles by it."""
        self.iteration = epoch
        here: Any = self._batches
        sampler: Any = self.base_dataloader.sampler
        parts = []
        while here is not None:
            parts.append(here)
            sampler, here = getattr(here, "sampler", None), getattr(here, "batch_sampler", None)
        for part in (*parts, sampler, self.base_dataloader.dataset):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    @property
    def _batches(self) -> Any:
        """The batch sampler, which torch keeps in one of two places."""
        inner = self.base_dataloader
        return inner.sampler if sampler_is_batch_sampler(inner) else inner.batch_sampler

    @property
    def _is_iterable(self) -> bool:
        return isinstance(self.base_dataloader.dataset, IterableDataset)

    def _iterate_from(self, entry: Mapping[str, Any] | None) -> Iterator[Any]:
        """Return the batches of the wrapped loader, from a saved position on."""
        sampler = get_sampler(self.base_dataloader)
        if entry is not None and entry["sampler"] is not None and hasattr(sampler, "load_state_dict"):
            sampler.load_state_dict(entry["sampler"])
        if entry is None or entry["batches"] == 0:
            return _same_draws(self.base_dataloader) if self._resumes else iter(self.base_dataloader)
        if not self._is_iterable:
            at = SamplerPosition(batches=entry["batches"], samples=entry["samples"])
            return _same_draws(self._loader_with(RemainingBatches(self._batches, at)))
        source = self._stateful_dataset()
        if source is not None and entry["dataset"] is not None:
            source.load_state_dict(entry["dataset"])
            return _same_draws(self.base_dataloader)
        return islice(_same_draws(self.base_dataloader), entry["batches"], None)

    def hand_over(self, rest: Any) -> None:
        """Let `rest`, a copy that skips batches, finish the epoch; a position that was loaded is used up by it.

        The next iteration of this loader is then the next epoch, as if the epoch had not been interrupted.
        """
        entry, self._entry = self._entry, None
        sampler = get_sampler(self.base_dataloader)
        if entry is not None and entry["sampler"] is not None and hasattr(sampler, "load_state_dict"):
            sampler.load_state_dict(entry["sampler"])
        if self.use_stateful_dataloader:
            # What torchdata's loader would resume from.
            cast(Any, self.base_dataloader).next_iter_state = None
        self._rest, rest._skips_for, rest._resumes = rest, self, entry is not None and entry["batches"] > 0

    def _finish_epoch(self, epoch: int) -> None:
        """Continue with the next epoch, also in the loader that this one is a copy of."""
        self.iteration, self._rest, self._resumes = epoch, None, False
        skips_for, self._skips_for = self._skips_for, None
        if skips_for is not None:
            skips_for._finish_epoch(epoch)

    def _position(self, taken: int, entry: Mapping[str, Any] | None) -> SamplerPosition:
        """Return the position of all ranks after `taken` batches of the wrapped loader, which began at `entry`."""
        if self._is_iterable:
            return SamplerPosition(batches=taken + (entry["batches"] if entry is not None else 0))
        now, begun = (position_after(self._batches, count) for count in (taken, 0))
        if entry is None:
            return now
        return SamplerPosition(
            batches=now.batches - begun.batches + entry["batches"],
            samples=now.samples - begun.samples + entry["samples"],
        )

    def _saved_position(self, iteration: int, at: SamplerPosition) -> dict[str, Any]:
        """Return what to save to resume an epoch at a position, or at its start."""
        sampler, source = get_sampler(self.base_dataloader), self._stateful_dataset()
        begun = at.batches > 0
        drawn = sampler.state_dict(finished=not begun) if isinstance(sampler, ReplayableRandomSampler) else None
        held = source.state_dict() if source is not None and begun else None
        return {"iteration": iteration, **asdict(at), "sampler": drawn, "dataset": held}

    def _stateful_dataset(self) -> Any:
        """Return an iterable dataset that saves its own state, if it is in this process; else None."""
        source: Any = self.base_dataloader.dataset
        source = source.dataset if isinstance(source, IterableDatasetShard) else source
        if self.base_dataloader.num_workers or not self._is_iterable:
            return None
        return source if hasattr(source, "state_dict") and hasattr(source, "load_state_dict") else None

    def _loader_with(self, batches: Any) -> DataLoader[Any]:
        """Return a loader like the wrapped one with another batch sampler."""
        dropped = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
        kept = {name: value for name, value in self._arguments.items() if name not in dropped}
        if sampler_is_batch_sampler(self.base_dataloader):
            return DataLoader(self.base_dataloader.dataset, sampler=batches, batch_size=None, **kept)
        return DataLoader(self.base_dataloader.dataset, batch_sampler=batches, **kept)


def _same_draws(loader: DataLoader[Any]) -> Iterator[Any]:
    """Begin to iterate without advancing the generator: the interrupted epoch drew its seed of workers before."""
    generator = loader.generator if loader.generator is not None else torch.default_generator
    before = generator.get_state()
    batches = iter(loader)
    generator.set_state(before)
    return batches


def _restore(kind: type[Any], attributes: dict[str, Any]) -> Any:
    loader: Any = object.__new__(kind)
    loader.__dict__.update(attributes)
    return loader


def _stateful_kind() -> type[DataLoader[Any]]:
    stateful = import_optional("torchdata.stateful_dataloader", extra="data", purpose="use_stateful_dataloader=True")
    kind: type[DataLoader[Any]] = stateful.StatefulDataLoader
    return kind


def sampler_is_batch_sampler(loader: Any) -> bool:
    """Return whether the dataset is indexed by batches: `DataLoader(sampler=BatchSampler(...), batch_size=None)`."""
    return isinstance(loader.sampler, BatchSampler)


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler that the order of a loader's samples comes from."""
    if sampler_is_batch_sampler(dataloader):
        return getattr(dataloader.sampler, "sampler", None)
    return getattr(dataloader.batch_sampler, "sampler", None)
