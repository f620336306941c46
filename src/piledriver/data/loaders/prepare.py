"""Prepare any torch `DataLoader`: shard it over ranks, skip its first batches, override how its end is padded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from piledriver.core.errors import UsageError
from piledriver.data.loaders.base import COPIED_ARGUMENTS, sampler_is_batch_sampler
from piledriver.data.loaders.dispatcher import DataLoaderDispatcher
from piledriver.data.loaders.iterable_shard import IterableDatasetShard
from piledriver.data.loaders.process_group import current_rank, data_parallel_rank
from piledriver.data.loaders.samplers.batch import BatchSamplerShard, SkipBatchSampler, Unbatched
from piledriver.data.loaders.samplers.random import copy_random_sampler
from piledriver.data.loaders.shard import DataLoaderShard, SkipDataLoader


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | str | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: list[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoader[Any]:
    """Return a loader that yields this rank's batches of another.

    The arguments are those of Accelerate. `split_batches`: the loader's batch size is that of all ranks together.
    `dispatch_batches`: only the main process reads (the default for iterable data that goes to a device).
    `even_batches`: pad the end so that all ranks read the same number of batches; the loader's `valid_count` counts the
    real samples. `use_seedable_sampler`, `data_seed`: shuffle by (seed, epoch). `torch_device_mesh`: ranks that differ
    only in non-data axes read the same batches.

    >>> loader = DataLoader(range(5), batch_size=2)
    >>> share = prepare_data_loader(loader, num_processes=2, process_index=1)
    >>> [(batch.tolist(), share.valid_count) for batch in share]
    [([2, 3], None), ([1, 2], 0)]
    """
    iterable = isinstance(dataloader.dataset, IterableDataset)
    if dispatch_batches is None:
        dispatch_batches = put_on_device and iterable
    if dispatch_batches and not put_on_device:
        raise ValueError("dispatch_batches=True needs put_on_device=True: batches are broadcast between devices")
    index, count = current_rank() if torch_device_mesh is None else data_parallel_rank(torch_device_mesh)
    num_processes = count if num_processes is None else num_processes
    process_index = index if process_index is None else process_index
    if split_batches:
        _check_split(dataloader, num_processes)

    copied = _copied(dataloader)
    placed = device if put_on_device else None
    common = {
        "_drop_last": dataloader.drop_last,
        "_non_blocking": non_blocking,
        "use_stateful_dataloader": use_stateful_dataloader,
        "torch_device_mesh": torch_device_mesh,
    }
    shared = num_processes > 1 and not dispatch_batches
    generator: torch.Generator | None = None
    dataset: Any = dataloader.dataset
    if iterable:
        generator = getattr(dataset, "generator", None)
        if shared:
            dataset = _iterable_shard(dataloader, num_processes, process_index, split_batches)
        whole = dataloader.batch_size
        each = whole // num_processes if shared and split_batches and whole is not None else whole
        copied.update(batch_size=each, drop_last=dataloader.drop_last)
    else:
        batches = _replayable(dataloader, use_seedable_sampler, data_seed, many=shared)
        generator = getattr(getattr(batches, "sampler", None), "generator", None)
        if shared:
            batches = BatchSamplerShard(batches, num_processes, process_index, split_batches, even_batches)
            # The count of real samples belongs to the last batch, so the order must be kept.
            copied["in_order"] = True
        copied.update(_as_arguments(dataloader, batches))
    if dispatch_batches:
        copied.pop("generator", None)
        return DataLoaderDispatcher(  # type: ignore[return-value]
            dataset,
            split_batches=split_batches,
            slice_fn=slice_fn_for_dispatch,
            device=device if device is not None else "cpu",
            **common,
            **copied,
        )
    if rng_types is not None and generator is None:
        rng_types = [kind for kind in rng_types if getattr(kind, "value", kind) != "generator"]
    return DataLoaderShard(  # type: ignore[return-value]
        dataset, device=placed, rng_types=rng_types, synchronized_generator=generator, **common, **copied
    )


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return the same loader without its first batches in every epoch. Map-style data in them is not read.

    Batches are counted from the start of the epoch, also after `load_state_dict`, whose position is used up: the loader
    itself continues with the next epoch.

    >>> [batch.tolist() for batch in skip_first_batches(DataLoader(range(6), batch_size=2), 2)]
    [[4, 5]]
    """
    copied = _copied(dataloader)
    kind: Any = type(dataloader)
    iterable = isinstance(dataloader.dataset, IterableDataset)
    if iterable:
        copied.update(batch_size=dataloader.batch_size, drop_last=dataloader.drop_last, skip_batches=num_batches)
    elif sampler_is_batch_sampler(dataloader):
        copied.update(sampler=SkipBatchSampler(dataloader.sampler, num_batches), batch_size=None)
    elif dataloader.batch_sampler is None:
        raise UsageError(
            "a loader with batch_size=None has no batches to skip",
            fix="give it a batch size, or load its state_dict instead",
        )
    else:
        copied.update(batch_sampler=SkipBatchSampler(dataloader.batch_sampler, num_batches))
    if kind not in (DataLoaderDispatcher, DataLoaderShard):
        return SkipDataLoader(dataloader.dataset, **copied) if iterable else DataLoader(dataloader.dataset, **copied)  # type: ignore[return-value]
    kept = ["device", "torch_device_mesh", "iteration", "_drop_last", "_non_blocking"]
    kept += ["split_batches", "slice_fn"] if kind is DataLoaderDispatcher else ["rng_types", "synchronized_generator"]
    made = kind(dataloader.dataset, **{name: getattr(dataloader, name) for name in kept}, **copied)
    made.gradient_state = dataloader.gradient_state  # type: ignore[attr-defined]
    prepared: Any = dataloader
    prepared.hand_over(made)
    return made  # type: ignore[no-any-return]


@contextmanager
def override_even_batches(loaders: Iterable[Any], wanted: bool | None) -> Iterator[None]:
    """Set `even_batches` of the loaders' batch samplers within the block; None changes nothing."""
    changed: list[tuple[Any, bool]] = []
    for loader in loaders if wanted is not None else ():
        sampler: Any = getattr(loader, "batch_sampler", None)
        if hasattr(sampler, "even_batches"):
            changed.append((sampler, sampler.even_batches))
            sampler.even_batches = wanted
        else:
            warnings.warn(
                "Overriding even_batches is only supported for map-style datasets, yet some dataloaders given were "
                "iterable",
                stacklevel=5,
            )
    try:
        yield
    finally:
        for sampler, before in changed:
            sampler.even_batches = before


def _copied(dataloader: Any) -> dict[str, Any]:
    return {name: getattr(dataloader, name) for name in COPIED_ARGUMENTS if hasattr(dataloader, name)}


def _check_split(dataloader: Any, num_processes: int) -> None:
    size = dataloader.batch_size
    if size is None:
        size = getattr(dataloader.batch_sampler, "batch_size", None)
    if size is None:
        raise ValueError(
            "split_batches=True needs a batch size: give the DataLoader's batch sampler an attribute batch_size"
        )
    if size > 1 and size % num_processes != 0:
        raise ValueError(
            f"with split_batches the batch size ({size}) must be a round multiple of the number of processes "
            f"({num_processes})"
        )


def _iterable_shard(dataloader: Any, num_processes: int, process_index: int, split_batches: bool) -> Any:
    dataset = dataloader.dataset
    # A dataset that can shard its own files saves every rank from reading all of them.
    if not split_batches and hasattr(dataset, "shard") and getattr(dataset, "n_shards", 0) >= num_processes:
        return dataset.shard(num_shards=num_processes, index=process_index)
    return IterableDatasetShard(
        dataset,
        batch_size=dataloader.batch_size,
        drop_last=dataloader.drop_last,
        num_processes=num_processes,
        process_index=process_index,
        split_batches=split_batches,
    )


def _replayable(dataloader: Any, seedable: bool, data_seed: int | None, many: bool) -> Any:
    """Return the loader's batch sampler over an order that can start anywhere and is the same on every rank."""
    batches = dataloader.sampler if sampler_is_batch_sampler(dataloader) else dataloader.batch_sampler
    if batches is None:
        batches = BatchSampler(dataloader.sampler, batch_size=1, drop_last=False)
    sampler = getattr(batches, "sampler", None)
    if type(sampler) is not RandomSampler:
        return batches
    generator = sampler.generator
    if many and not seedable and generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    fresh = copy_random_sampler(sampler, seedable=seedable, data_seed=data_seed, generator=generator)
    if type(batches) is BatchSampler:
        return BatchSampler(fresh, batches.batch_size, batches.drop_last)
    batches.sampler = fresh
    return batches


def _as_arguments(dataloader: Any, batches: Any) -> dict[str, Any]:
    if sampler_is_batch_sampler(dataloader):
        return {"sampler": batches, "batch_size": None}
    if dataloader.batch_sampler is None:
        return {"sampler": Unbatched(batches), "batch_size": None}
    return {"batch_sampler": batches}
