"""What torch's allocator holds beside the peak: a freed segment serves only tensors that fit into it."""

from __future__ import annotations

from piledriver.plan.memory.optimizer_workspace import NEWTON_SCHULZ, ROUNDING
from piledriver.plan.memory.phases import Phase

# Segments that Muon's temporaries take, relative to their bytes: stacks, iterates and products of different sizes do
# not fit each other's either. Those of nearly the size of a freed tensor do.
_MUON_SEGMENTS, _NEARLY = 1.3, 1.1
# Copies to the host are slower than compute: freed memory waits for them, and what comes back takes memory of its own.
_THERE_AND_BACK = 1.5


def stranded_bytes(
    phases: list[Phase], peak: Phase, *, freed: list[float], table: float, in_step: list[float], waiting: float
) -> float:
    """Return the bytes that the allocator holds beside those of the peak.

    `freed` are the largest activation, then the tensors that the loss frees; `table` is the gradient of a tied
    embedding, `in_step` are tensors of the optimizer step, `waiting` are activations on their way to the host.
    """
    beside = _THERE_AND_BACK * waiting + (table if table > max(freed) else 0.0)
    large = _large_in_step(phases[-1], freed, in_step)
    if large:
        return beside + max(0.0, max(phase.bytes for phase in phases[:-1]) + large - peak.bytes)
    # A bucket of stochastic rounding is larger than any activation; tensors of the loss are as large.
    rounding = sum(owner.bytes for owner in phases[-1].owners if owner.name == ROUNDING)
    if not rounding:
        return beside
    training = max(phase.bytes - phase.by_category()["loss"] for phase in phases[:-1])
    return max(0.0, training + rounding - peak.bytes)


def _large_in_step(step: Phase, freed: list[float], sizes: list[float]) -> float:
    """Return the bytes of an optimizer step's temporaries that are larger than what was freed before it."""
    stacked = sum(owner.bytes for owner in step.owners if owner.name == NEWTON_SCHULZ)
    if stacked:
        return _MUON_SEGMENTS * stacked if max(sizes, default=0.0) > _NEARLY * max(freed) else 0.0
    activation, *holes = freed
    total = 0.0
    for size in sorted(sizes, reverse=True):
        hole = next((hole for hole in holes if hole >= size), None)
        if hole is not None:
            holes.remove(hole)
        elif size > activation:
            total += size
    return total
