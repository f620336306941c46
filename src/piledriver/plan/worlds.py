"""Batch sizes that are valid for a range of world sizes, so that a run may lose or gain ranks (elastic training)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from piledriver.plan.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class ElasticBatch:
    """A global batch, and for each world size the micro-batch and the accumulation that give it exactly."""

    batch: int
    worlds: dict[int, tuple[int, int]]
    """World size to (micro-batch, accumulation)."""


def elastic_batch(
    most: int, micro_batches: Sequence[int], *, smallest: int = 1, largest: int = 10_000, prefer_larger: bool = True
) -> ElasticBatch:
    """Return the batch of at most `most` sequences that the most world sizes divide with one of the micro-batches.

    Ties go to the larger batch unless `prefer_larger` is false. Each world uses the largest micro-batch that fits.

    >>> found = elastic_batch(16, [2, 4], largest=8)
    >>> found.batch, sorted(found.worlds)
    (16, [1, 2, 4, 8])
    """
    sizes = sorted(set(micro_batches))
    if most < 1 or not sizes or sizes[0] < 1 or smallest > largest:
        raise PlanError(
            f"no batch of at most {most} for micro-batches {list(micro_batches)} and {smallest} to {largest} ranks",
            fix="give a batch and micro-batches of 1 or more, and a range of ranks",
        )
    candidates = {size * count for size in sizes for count in range(1, most // size + 1)}
    if not candidates:
        raise PlanError(f"micro-batch {sizes[0]} is larger than the batch {most}", fix=f"use a batch of {sizes[0]}")
    best: ElasticBatch | None = None
    for batch in sorted(candidates, reverse=prefer_larger):
        found = _worlds(batch, sizes, smallest, largest)
        if found and (best is None or len(found) > len(best.worlds)):
            best = ElasticBatch(batch=batch, worlds=found)
    if best is None:
        raise PlanError(
            f"no batch of at most {most} is divided by {smallest} to {largest} ranks with micro-batches {sizes}",
            fix=f"use a batch of {smallest * sizes[0]} or more",
        )
    return best


def _worlds(batch: int, sizes: list[int], smallest: int, largest: int) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for size in sizes:
        calls, rest = divmod(batch, size)
        if rest:
            continue
        for world in range(smallest, min(largest, calls) + 1):
            if calls % world == 0:
                found[world] = size, calls // world
    return found
