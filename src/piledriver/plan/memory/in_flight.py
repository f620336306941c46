"""Micro-batches whose activations are alive at once on a pipeline rank, by schedule."""

from __future__ import annotations

from piledriver.engine.layout import Layout


def micro_batches_in_flight(layout: Layout, rank: int, count: int) -> float:
    """Return the most of `count` micro-batches that are alive at once on a rank, in units of all its blocks."""
    if layout.pp == 1:
        return 1.0
    after = layout.pp - rank
    if layout.schedule in ("gpipe", "looped-bfs"):
        return float(count)
    if layout.schedule == "1f1b":
        return float(min(count, after))
    if layout.schedule in ("zbv", "dualpipev"):
        return min(count, layout.pp)
    per = layout.stages // layout.pp
    chunks = (after - 1) * 2 + (per - 1) * layout.pp + 1
    return min(float(count), chunks / per)


def runs_forwards_first(layout: Layout, rank: int, count: int) -> bool:
    """Return whether a rank runs the forwards of all micro-batches before its first backward."""
    return layout.pp > 1 and micro_batches_in_flight(layout, rank, count) >= count


def in_flight_after_a_backward(layout: Layout, rank: int, count: int, stages: int) -> float:
    """Return how many are alive when all stages of a rank have gradients for the first time, but for its last block.

    Of several stages that ran all forwards first, one has run its backwards when the next begins.
    """
    most = micro_batches_in_flight(layout, rank, count)
    return most * (1 - 1 / stages) if stages > 1 and runs_forwards_first(layout, rank, count) else most - 1.0
