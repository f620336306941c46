"""Pipeline schedules by name: torch's class, the rank of each stage, and the number of micro-batches."""

from __future__ import annotations

from typing import Any

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


def schedule_class(name: str) -> Any:
    """Return torch's class of a schedule."""
    from torch.distributed.pipelining import schedules

    return getattr(schedules, _CLASSES[name])


def rank_of_stage(layout: Layout, stage: int) -> int:
    """Return the pipeline rank of a stage: in a loop, or in a V.

    >>> [rank_of_stage(Layout(pp=2, schedule="zbv"), stage) for stage in range(4)]
    [0, 1, 1, 0]
    >>> [rank_of_stage(Layout(pp=2, schedule="interleaved-1f1b"), stage) for stage in range(4)]
    [0, 1, 0, 1]
    """
    turn, place = divmod(stage, layout.pp)
    return layout.pp - 1 - place if layout.schedule in TWO_STAGES_A_RANK and turn % 2 else place


def stages_of_rank(layout: Layout, rank: int) -> list[int]:
    """Return the stages of a pipeline rank, in order."""
    return [stage for stage in range(layout.stages) if rank_of_stage(layout, stage) == rank]


def microbatches_of(layout: Layout) -> int:
    """Return the number of micro-batches; twice the stages unless the layout sets it.

    >>> microbatches_of(Layout(pp=2))
    4
    """
    return 2 * layout.stages if layout.microbatches is None else layout.microbatches
