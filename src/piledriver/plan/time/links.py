"""Seconds of collectives on the links of a cluster: ring algorithms, bytes over bandwidth plus latency."""

from __future__ import annotations

import math
from dataclasses import dataclass

from piledriver.engine.layout import Layout
from piledriver.plan.hardware.cluster import Cluster
from piledriver.plan.time.rates import Efficiency

# Hops that starting a collective inside a node takes as long as.
_START = 10


@dataclass(frozen=True)
class Axis:
    """A group of ranks: how many, and how far apart in rank order."""

    size: int
    stride: int


def axes_of_layout(layout: Layout) -> dict[str, Axis]:
    """Return the groups of a resolved layout, in the engine's rank order: (pp, dp_replicate, dp_shard, cp, tp)."""
    assert layout.dp_replicate is not None
    assert layout.dp_shard is not None
    tp, cp = layout.tp, layout.cp
    shard, replicate = layout.dp_shard, layout.dp_replicate
    if layout.zero:
        data, copies = Axis(shard * cp, tp), Axis(replicate, tp * cp * shard)
    else:
        data, copies = Axis(1, tp), Axis(replicate * shard * cp, tp)
    over = data.size if layout.zero else copies.size
    return {
        "tp": Axis(tp, 1),
        "cp": Axis(cp, tp),
        "ep": Axis(layout.ep, tp),
        "expert_dp": Axis(over // layout.ep, tp * layout.ep),
        "dp_shard": data,
        "dp_replicate": copies,
        "pp": Axis(layout.pp, tp * cp * shard * replicate),
    }


def collective_seconds(kind: str, size: float, axis: Axis, cluster: Cluster, efficiency: Efficiency) -> float:
    """Return the seconds of one collective; `size` is the bytes of its larger side on one rank.

    >>> from piledriver.plan.hardware.parse import parse_hardware
    >>> machine = parse_hardware("16xh100-80g")
    >>> inside = collective_seconds("all-reduce", 1e9, Axis(8, 1), machine, Efficiency())
    >>> across = collective_seconds("all-reduce", 1e9, Axis(2, 8), machine, Efficiency())
    >>> inside < across
    True
    """
    ranks = axis.size
    if ranks <= 1 or size <= 0:
        return 0.0
    link, inside = cluster.group(ranks, axis.stride)
    within = inside >= ranks
    share = cluster.device.efficiency["link"] * efficiency.link
    if not within:
        share = cluster.device.efficiency["network"] * efficiency.network
    rate = link.bytes_per_second * share
    steps = math.ceil(math.log2(ranks)) if not within else ranks - 1
    moved = {"all-reduce": 2.0 * (ranks - 1) / ranks, "send": 1.0}.get(kind, (ranks - 1) / ranks)
    hops = {"all-reduce": 2 * steps, "send": 1}.get(kind, steps) + (_START if within else 0)
    return size * moved / rate + hops * link.latency
