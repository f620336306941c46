"""Processes with different amounts of data: those that run out shadow the others until the last one is done."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.algorithms.join import Join, Joinable

from piledriver.accelerator.replicas import reducer_of

if TYPE_CHECKING:
    from piledriver.accelerator.accelerator import Accelerator


@contextmanager
def joined(accelerator: Accelerator, things: list[Any], even_batches: bool | None) -> Iterator[None]:
    """torch's `Join` over the reducers of prepared models (and anything else that is joinable)."""
    if not accelerator.use_distributed:
        yield
        return
    joinables: list[Joinable] = []
    for thing in things:
        joinable = reducer_of(thing) if isinstance(thing, nn.Module) else thing
        if isinstance(joinable, Joinable):
            joinables.append(joinable)
    if not joinables:
        warnings.warn(
            "Joining uneven inputs is only supported for multi-GPU and multi-CPU training of prepared models; nothing "
            "given is one, so `join_uneven_inputs` will have no effect.",
            UserWarning,
            stacklevel=4,
        )
        yield
        return
    with _even_batches(accelerator, even_batches), Join(joinables, enable=True, throw_on_early_termination=False):
        yield


@contextmanager
def _even_batches(accelerator: Accelerator, wanted: bool | None) -> Iterator[None]:
    """Loaders fill up their ends, or not, within the block."""
    if wanted is None:
        yield
        return
    changed: list[tuple[Any, bool]] = []
    for loader in accelerator._dataloaders:
        sampler: Any = getattr(loader, "batch_sampler", None)
        if hasattr(sampler, "even_batches"):
            changed.append((sampler, sampler.even_batches))
            sampler.even_batches = wanted
        else:
            warnings.warn(
                "Overriding even_batches is only supported for map-style datasets, yet some dataloaders given were "
                "iterable",
                stacklevel=4,
            )
    try:
        yield
    finally:
        for sampler, before in changed:
            sampler.even_batches = before
