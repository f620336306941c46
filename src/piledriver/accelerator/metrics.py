"""Gather predictions for metrics: every sample once, without the padding that makes batches even.

The loader counts the samples of the current batch that are not padding on this rank; the counts are gathered with the
data, so that the length of the dataset is not needed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from piledriver.accelerator.state.accumulation import GradientState
from piledriver.runtime.collectives.nested import leaves, map_tensors
from piledriver.runtime.collectives.operations import gather, gather_object
from piledriver.runtime.world import World


def gather_for_metrics(
    world: World,
    state: GradientState,
    data: Any,
    use_gather_object: bool = False,
    readers: Collection[int] | None = None,
) -> Any:
    """Return the samples of every rank in rank order, without padding.

    Anything that is not all tensors is gathered as objects: each process gives a list with one entry per sample.
    Where some processes read the same batches (tensor, context and pipeline axes), `readers` are the ranks that count.
    """
    as_objects = use_gather_object or not all(isinstance(leaf, torch.Tensor) for _, leaf in leaves(data))
    if not state.end_of_dataloader and readers is None:
        return _objects(world, data) if as_objects else gather(world, data)
    counts = _valid_counts(world, state, world.size if readers is None else len(readers))
    if readers is not None:
        counts = [count if rank in readers else 0 for rank, count in enumerate(counts)]
    if as_objects:
        parts = gather_object(world, data)
        if not all(hasattr(part, "__len__") and hasattr(part, "__getitem__") for part in parts):
            return [item for part in parts for item in part]
        return [item for part, count in zip(parts, counts, strict=True) for item in part[:count]]
    if all(count is None for count in counts):
        return gather(world, data)
    return map_tensors(lambda tensor: _real_rows(tensor, counts), gather(world, data))


def _valid_counts(world: World, state: GradientState, shares: int) -> list[int | None]:
    """Return for each rank how many of its samples are real; None where all are."""
    loader = state.active_dataloader
    mine = getattr(loader, "valid_count", None) if state.end_of_dataloader else None
    if mine is None and shares == 1 and state.end_of_dataloader and state.remainder > 0:
        # Also an unpadded batch: a loss repeated to the full batch size counts as often as there are samples.
        mine = state.remainder
    return gather_object(world, mine) if world.is_distributed else [mine]


def _real_rows(tensor: torch.Tensor, counts: list[int | None]) -> torch.Tensor:
    if tensor.ndim == 0 or tensor.shape[0] % len(counts):
        return tensor
    each = tensor.shape[0] // len(counts)
    kept = torch.tensor([each if count is None else min(count, each) for count in counts], device=tensor.device)
    if bool((kept == each).all()):
        return tensor
    row = torch.arange(tensor.shape[0], device=tensor.device)
    return tensor[row % each < kept[row // each]]


def _objects(world: World, data: Any) -> list[Any]:
    return [item for part in gather_object(world, data) for item in part]
