"""Rules about several ranks: buckets, overlap, stragglers."""

from __future__ import annotations

import statistics

from piledriver.observe.memory.use import readable
from piledriver.observe.report.values import Advice
from piledriver.plan.advice.case import Case, milliseconds, share
from piledriver.plan.time.links import Axis, collective_seconds
from piledriver.plan.time.rates import Efficiency

_BUCKET = 25 * 2**20
_KINDS = {"all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}


def small_buckets(case: Case) -> Advice | None:
    """Gradients travel in many small collectives, whose latency is most of their time."""
    rows = [row for row in case.report.traffic if row.name in _KINDS and row.seconds]
    steps = case.rank.steps
    count = sum(row.count for row in rows) / steps
    total = sum(row.bytes for row in rows) / steps
    if count < 8 or not total or total / count > 2**20:
        return None
    now = sum(row.count * (row.seconds or 0.0) for row in rows) / steps
    ranks = max(row.ranks for row in rows)
    buckets = max(1.0, total / _BUCKET)
    latency = min(row.seconds or 0.0 for row in rows)
    # The larger of the planner's time for the bytes and the fastest rate that was seen, plus a latency for each bucket.
    planned = collective_seconds("all-reduce", total, Axis(ranks, 1), case.cluster, Efficiency())
    seen = max((row.algorithm_bandwidth or 0.0) for row in rows)
    after = max(planned, min(total / seen if seen else 0.0, now / 4)) + buckets * latency
    exposed = case.seconds("exposed_communication")
    return case.advice(
        "small buckets",
        "send gradients in larger buckets",
        f"{count:.0f} collectives a step of {readable(total / count)} on average; {milliseconds(exposed)} of "
        f"{milliseconds(case.step)} are exposed communication ({share(exposed, case.step)})",
        "DistributedDataParallelKwargs(bucket_cap_mb=25), or the default Layout, whose reducer fills buckets",
        case.step - exposed * max(0.0, 1 - after / now),
    )


def straggler(case: Case) -> Advice | None:
    """One rank reaches the collectives late, and all others wait."""
    if not case.report.stragglers:
        return None
    worst = case.report.stragglers[0]
    if worst.last_share < 0.6 and len(case.report.ranks) > 1:
        return None
    late = worst.late_seconds / case.rank.steps
    waiting = [one.seconds["exposed_communication"] / one.steps for one in case.report.ranks if one.rank != worst.rank]
    late = min(late, statistics.median(waiting)) if waiting else late
    return case.advice(
        "straggler",
        f"find out why rank {worst.rank} is slow",
        f"rank {worst.rank} is last at {worst.last_share:.0%} of the collectives and late by "
        f"{milliseconds(late)} a step; it spends more in {worst.cause.replace('_', ' ')}",
        "compare its host and device (clocks, other processes, its share of the data) with the others'",
        case.step - late,
    )


def exposed_communication(case: Case) -> Advice | None:
    """Communication is not hidden behind the backward."""
    exposed = case.seconds("exposed_communication")
    if exposed < 0.1 * case.step or len(case.report.ranks) < 2:
        return None
    backward = sum(row.seconds["backward"] for row in case.rank.modules if "." not in row.path) / case.rank.steps
    hidden = min(exposed, 0.8 * backward)
    return case.advice(
        "exposed communication",
        "overlap communication with the backward",
        f"{milliseconds(exposed)} of a step ({share(exposed, case.step)}) are communication that nothing hides; the "
        f"backward takes {milliseconds(backward)}",
        "reduce gradients as they are made (DDP, Layout(zero=1)), with accumulation only in the last micro-batch",
        case.step - 0.7 * hidden,
    )
