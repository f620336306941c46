"""Compare ranks: traffic with skew, stragglers, and the critical path through all ranks."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from piledriver.observe.communication.bandwidth import Traffic
from piledriver.observe.profile.collectives import CollectiveCall
from piledriver.observe.profile.rank import RankProfile


@dataclass(slots=True)
class Straggler:
    """A rank that others wait for."""

    rank: int
    late_seconds: float
    """How much later than the median rank it reaches a collective, summed over the window."""
    last_share: float
    """Share of the collectives that it reached last."""
    cause: str
    """The part of wall time in which it exceeds the median rank most."""


@dataclass(slots=True)
class PathPart:
    """A stretch of the critical path: what the end of the window waited for."""

    rank: int
    cause: str
    seconds: float


def clock_offsets(ranks: Sequence[RankProfile]) -> dict[int, float]:
    """Return microseconds to add to each rank's times, which count from the first event of its trace.

    Ranks of one host share a clock. On several hosts, a collective ends on all ranks at about the same time.
    """
    first = ranks[0]
    if len({one.host.partition(":")[0] for one in ranks}) < 2:
        return {one.rank: one.timeline.base_us - first.timeline.base_us for one in ranks}
    ends = [one.end for one in first.collectives]
    found = {first.rank: 0.0}
    for other in ranks[1:]:
        pairs = [mine - call.end for mine, call in zip(ends, other.collectives, strict=False)]
        found[other.rank] = statistics.median(pairs) if pairs else 0.0
    return found


def traffic(ranks: Sequence[RankProfile]) -> list[Traffic]:
    """Return counts, bytes, bandwidth and skew by group, collective and size; counts are of one rank."""
    offsets = clock_offsets(ranks)
    together: dict[tuple[str, str, int, int], dict[int, list[CollectiveCall]]] = defaultdict(lambda: defaultdict(list))
    for one in ranks:
        for call in one.collectives:
            together[call.group, call.name, call.ranks or len(ranks), call.bytes][one.rank].append(call)
    rows = []
    for (group, name, size, count), by_rank in together.items():
        # The shortest over ranks: the others' include waiting for the last rank.
        calls = list(zip(*by_rank.values(), strict=False))
        shortest = [min(call.end - call.start for call in same) / 1e6 for same in calls]
        skews = [_skew(list(by_rank), same, offsets) for same in calls] if len(by_rank) > 1 else []
        rows.append(
            Traffic(
                name,
                group,
                size,
                count,
                max(map(len, by_rank.values())),
                statistics.median(shortest) if shortest else None,
                statistics.median(skews) / 1e6 if skews else None,
            )
        )
    return sorted(rows, key=lambda row: -row.bytes)


def _skew(ranks: list[int], calls: Sequence[CollectiveCall], offsets: dict[int, float]) -> float:
    arrivals = [call.start + offsets[rank] for rank, call in zip(ranks, calls, strict=True)]
    return max(arrivals) - min(arrivals)


def stragglers(ranks: Sequence[RankProfile]) -> list[Straggler]:
    """Return ranks that reach collectives late, latest first. A rank counts from 2% of its wall time."""
    if len(ranks) < 2:
        return []
    offsets = clock_offsets(ranks)
    late: dict[int, float] = defaultdict(float)
    last: dict[int, int] = defaultdict(int)
    calls = list(zip(*(one.collectives for one in ranks), strict=False))
    for same in calls:
        arrivals = [call.start + offsets[one.rank] for one, call in zip(ranks, same, strict=True)]
        middle = statistics.median_low(arrivals)
        for one, arrival in zip(ranks, arrivals, strict=True):
            late[one.rank] += max(0.0, arrival - middle) / 1e6
        last[ranks[arrivals.index(max(arrivals))].rank] += 1
    found = [
        Straggler(one.rank, late[one.rank], last[one.rank] / max(1, len(calls)), _excess(one, ranks))
        for one in ranks
        if late[one.rank] > 0.02 * one.wall_seconds
    ]
    return sorted(found, key=lambda one: -one.late_seconds)


def _excess(rank: RankProfile, ranks: Sequence[RankProfile]) -> str:
    causes = [cause for cause in rank.seconds if cause != "exposed_communication"]
    return max(
        causes, key=lambda cause: rank.seconds[cause] - statistics.median_low(one.seconds[cause] for one in ranks)
    )


def critical_path(ranks: Sequence[RankProfile]) -> list[PathPart]:
    """Return what the window's end waited for, walking back: at a collective, over to the rank that came last.

    Between collectives the path runs through one rank; its time there is divided by cause as the rank's lanes say.
    """
    offsets = clock_offsets(ranks)
    by_rank = {one.rank: one for one in ranks}
    current = max(ranks, key=lambda one: one.timeline.begin_us + one.timeline.wall_us)
    found: dict[tuple[int, str], float] = defaultdict(float)
    end = _begin(current) + current.timeline.wall_us
    for index in reversed(range(min((len(one.collectives) for one in ranks), default=0))):
        arrivals = {one.rank: one.collectives[index].start + offsets[one.rank] for one in ranks}
        last = max(arrivals, key=lambda rank: arrivals[rank])
        finished = current.collectives[index].end
        if finished > end:
            continue
        _add(found, current, finished, end)
        began = arrivals[last] - offsets[last]
        found[last, "communication"] += max(0.0, finished + offsets[current.rank] - arrivals[last]) / 1e6
        current, end = by_rank[last], began
    _add(found, current, _begin(current), end)
    parts = [PathPart(rank, cause, seconds) for (rank, cause), seconds in found.items() if seconds > 0]
    return sorted(parts, key=lambda part: -part.seconds)


def _begin(rank: RankProfile) -> float:
    return rank.timeline.begin_us - rank.timeline.base_us


def _add(found: dict[tuple[int, str], float], rank: RankProfile, start: float, end: float) -> None:
    """Divide a stretch of a rank by cause."""
    origin = _begin(rank)
    for begin, duration, cause in rank.timeline.lanes.get("wall", ()):
        inside = min(end, origin + begin + duration) - max(start, origin + begin)
        if inside > 0:
            found[rank.rank, cause] += inside / 1e6
