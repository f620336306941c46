"""Override within a block whether prepared loaders fill up their last batches."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


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
