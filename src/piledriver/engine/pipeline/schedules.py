"""The schedules by name: torch's class, where stages live, and how many micro-batches each can run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piledriver.engine.errors import LayoutError
from piledriver.engine.layout import TWO_STAGES_A_RANK, Layout

_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
_SPLIT_BACKWARD = frozenset({"interleaved-zero-bubble", "zbv", "dualpipev"})


def schedule_class(name: str) -> Any:
    """torch's class of a schedule."""
    from torch.distributed.pipelining import schedules

    return getattr(schedules, _CLASSES[name])


def splits_backward(name: str) -> bool:
    """Whether a schedule computes gradients of inputs first and those of weights later, to fill bubbles."""
    return name in _SPLIT_BACKWARD


def rank_of_stage(layout: Layout, stage: int) -> int:
    """Which pipeline rank holds a stage: round and round, or there and back (a V).

    >>> [rank_of_stage(Layout(pp=2, schedule="zbv"), stage) for stage in range(4)]
    [0, 1, 1, 0]
    >>> [rank_of_stage(Layout(pp=2, schedule="interleaved-1f1b"), stage) for stage in range(4)]
    [0, 1, 0, 1]
    """
    turn, place = divmod(stage, layout.pp)
    return layout.pp - 1 - place if layout.schedule in TWO_STAGES_A_RANK and turn % 2 else place


def stages_of_rank(layout: Layout, rank: int) -> list[int]:
    """The stages that a pipeline rank holds, in order."""
    return [stage for stage in range(layout.stages) if rank_of_stage(layout, stage) == rank]


def microbatches_of(layout: Layout) -> int:
    """How many parts a batch is cut into; raises `LayoutError` where the schedule cannot run so many.

    >>> microbatches_of(Layout(pp=2))
    4
    >>> microbatches_of(Layout(pp=4, schedule="interleaved-1f1b", microbatches=11))
    Traceback (most recent call last):
    piledriver.engine.errors.LayoutError: interleaved-1f1b with 8 stages on 4 ranks cannot run 11 microbatches: they \
must fill rounds of 4 or more evenly. Fix: use microbatches=12
    """
    if layout.microbatches is None:
        return 2 * layout.stages
    wanted = layout.microbatches
    rule, why = _rule(layout)
    if rule(wanted):
        return wanted
    # Counting outward finds the nearest; the larger of two equally near ones keeps the bubble smaller.
    distance = next(d for d in range(1, wanted + 2 * layout.stages) if rule(wanted - d) or rule(wanted + d))
    nearest = wanted + distance if rule(wanted + distance) else wanted - distance
    raise LayoutError(
        f"{layout.schedule} with {layout.stages} stages on {layout.pp} ranks cannot run {wanted} microbatches: {why}",
        fix=f"use microbatches={nearest}",
    )


def _rule(layout: Layout) -> tuple[Callable[[int], bool], str]:
    if layout.schedule in ("1f1b", "dualpipev"):
        return lambda n: n >= layout.stages, f"it needs at least {layout.stages}, one for each stage"
    if layout.schedule in ("interleaved-1f1b", "interleaved-zero-bubble"):
        return (
            lambda n: n >= 1 and n % max(1, n // layout.pp) == 0,
            f"they must fill rounds of {layout.pp} or more evenly",
        )
    return lambda n: n >= 1, "it needs at least 1"
