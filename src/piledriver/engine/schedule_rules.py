"""What each pipeline schedule can run: how many micro-batches, and what kind of blocks."""

from __future__ import annotations

from collections.abc import Callable

from piledriver.engine.errors import LayoutError

SPLIT_BACKWARD: frozenset[str] = frozenset({"interleaved-zero-bubble", "zbv", "dualpipev"})
"""Schedules that compute gradients of inputs first and those of weights later. The backward of a compiled block is one
piece, so with these nothing is compiled."""


def check_microbatches(schedule: str, *, ranks: int, stages: int, microbatches: int) -> None:
    """Raise `LayoutError` with the nearest number where a schedule cannot run so many micro-batches.

    >>> check_microbatches("interleaved-1f1b", ranks=4, stages=8, microbatches=11)
    Traceback (most recent call last):
    piledriver.engine.errors.LayoutError: interleaved-1f1b with 8 stages on 4 ranks cannot run 11 microbatches: they \
must fill rounds of 4 or more evenly. Fix: use microbatches=12
    """
    rule, why = _rule(schedule, ranks, stages)
    if rule(microbatches):
        return
    # Counting outward finds the nearest; the larger of two equally near ones keeps the bubble smaller.
    distance = next(d for d in range(1, microbatches + 2 * stages) if rule(microbatches - d) or rule(microbatches + d))
    nearest = microbatches + distance if rule(microbatches + distance) else microbatches - distance
    raise LayoutError(
        f"{schedule} with {stages} stages on {ranks} ranks cannot run {microbatches} microbatches: {why}",
        fix=f"use microbatches={nearest}",
    )


def _rule(schedule: str, ranks: int, stages: int) -> tuple[Callable[[int], bool], str]:
    if schedule in ("1f1b", "dualpipev"):
        return lambda n: n >= stages, f"it needs at least {stages}, one for each stage"
    if schedule in ("interleaved-1f1b", "interleaved-zero-bubble"):
        return lambda n: n >= 1 and n % max(1, n // ranks) == 0, f"they must fill rounds of {ranks} or more evenly"
    return lambda n: n >= 1, "it needs at least 1"
