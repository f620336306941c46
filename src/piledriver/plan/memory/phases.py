"""`Timeline`: the memory of one step as phases with owners by category; allocated, reserved and driver totals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

CATEGORIES = (
    "weights",
    "gradients",
    "optimizer states",
    "kept activations",
    "gathered parameters",
    "communication buffers",
    "loss",
    "workspace",
)
_GIB = 2**30
# What torch's allocator reserves beyond the allocated peak: rounding of blocks, and gaps between them.
_RESERVED_SHARE, _RESERVED_BYTES = 0.03, 0.25 * _GIB
# The CUDA context with its libraries' code, and one communicator's buffers, which no allocator counts.
_CONTEXT_BYTES, _COMMUNICATOR_BYTES = 0.55 * _GIB, 0.35 * _GIB


class Owner(NamedTuple):
    """Bytes with a name and a category."""

    category: str
    name: str
    bytes: float


class Phase(NamedTuple):
    """A moment of the step with everything that is allocated then."""

    name: str
    owners: tuple[Owner, ...]
    bytes: float
    """Bytes allocated."""

    def by_category(self) -> dict[str, float]:
        """Return the bytes of each category."""
        found = dict.fromkeys(CATEGORIES, 0.0)
        for owner in self.owners:
            found[owner.category] += owner.bytes
        return found


def make_phase(name: str, owners: list[Owner]) -> Phase:
    """Return a phase with the sum of its owners."""
    return Phase(name, tuple(owners), math.fsum([owner[2] for owner in owners]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The memory of one step on one kind of rank."""

    rank: str
    """Which rank: `every rank`, `first stage`, `last stage` or `stage n`."""
    phases: tuple[Phase, ...]
    host: float
    """Bytes of host memory for one rank."""
    disk: float
    """Bytes of files for one rank."""
    communicators: int
    peak: Phase
    """The phase with the most bytes."""
    pipeline_rank: int = 0
    stranded: float = 0.0
    """Bytes that the allocator holds beside the peak: freed in segments that the peak's tensors do not fit."""

    @property
    def allocated(self) -> float:
        """Largest bytes that tensors take."""
        return self.peak.bytes

    @property
    def reserved(self) -> float:
        """Bytes that torch's allocator holds at the peak."""
        return (self.allocated + self.stranded) * (1 + _RESERVED_SHARE) + _RESERVED_BYTES

    @property
    def driver(self) -> float:
        """Bytes that the driver shows: the allocator's, the context and the communicators'."""
        return self.reserved + _CONTEXT_BYTES + self.communicators * _COMMUNICATOR_BYTES

    def largest(self, count: int = 5) -> list[Owner]:
        """Return the largest owners at the peak."""
        return sorted(self.peak.owners, key=lambda owner: -owner.bytes)[:count]
