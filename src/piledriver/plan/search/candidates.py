"""Enumerate the layouts that a model, a batch and a cluster allow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from piledriver.core.errors import PiledriverError
from piledriver.engine.context_parallel.apply import check_model
from piledriver.engine.layout import Layout, Zero
from piledriver.engine.tensor_parallel.transformer import check_tp_divisible
from piledriver.engine.tiers import Offload, OffloadPreset
from piledriver.models.config import ModelConfig
from piledriver.plan.hardware.cluster import Cluster
from piledriver.plan.prediction import Workload

# Shorter parts of a sequence are not worth a ring.
_SHORTEST_PART = 2048
_MOST_MICRO_BATCHES = 7


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the search may vary. A field of `fixed` is taken as given."""

    precisions: tuple[str, ...] = ("bf16",)
    activations: tuple[str, ...] = ("keep", "norms", "selective", "full")
    """Activation policies; `norms` keeps all but the norms' outputs."""
    offloads: tuple[OffloadPreset | Offload, ...] = ("none", "optimizer", "parameters")
    fixed: Layout | None = None
    """A layout whose fields that differ from the defaults are kept."""
    sequences: int | None = None
    """Sequences of a micro-batch, if given."""
    zeros: tuple[Zero, ...] = (0, 1, 2, 3)
    """Stages of ZeRO."""
    tps: tuple[int, ...] | None = None
    """Sizes of tp; None for all."""
    data_parallel_only: bool = False
    """Only replicas and ZeRO: cp, pp and ep stay 1, and tp unless `tps` says otherwise."""
    disk: str | None = None
    """A folder on a local disk, where masters and optimizer states may live."""
    compile: bool | str | None = None
    """Whether blocks are compiled; None: what the engine does by itself."""


def meshes(workload: Workload, cluster: Cluster, wishes: Wishes) -> Iterator[Layout]:
    """Yield layouts that differ in their axes: tp, cp, pp, ep, zero, replicas, schedule."""
    config, count = workload.config, cluster.count
    if wishes.data_parallel_only:
        for tp in wishes.tps or (1,):
            if count % tp == 0 and _allows(lambda tp=tp: check_tp_divisible(config, tp), tp):
                yield from _data_parallel(workload, cluster, wishes, tp, 1, 1)
        return
    for tp in wishes.tps or _sizes(min(count, cluster.node_size)):
        if count % tp or not _allows(lambda tp=tp: check_tp_divisible(config, tp), tp):
            continue
        for cp in _sizes(count // tp):
            if cp > 1 and (workload.length // cp < _SHORTEST_PART or workload.length % (2 * cp)):
                break
            for pp in divisors(count // (tp * cp)):
                if pp > config.layers:
                    break
                yield from _data_parallel(workload, cluster, wishes, tp, cp, pp)


def _data_parallel(workload: Workload, cluster: Cluster, wishes: Wishes, tp: int, cp: int, pp: int) -> Iterator[Layout]:
    config = workload.config
    left = cluster.count // (tp * cp * pp)
    if workload.batch % left:
        return
    sizes: dict[str, Any] = {"tp": tp, "cp": cp, "pp": pp}
    if cp > 1 and not _allows(lambda: check_model(config, Layout(**sizes)), cp):
        sizes["cp_method"] = "all-to-all"
        if not _allows(lambda: check_model(config, Layout(**sizes)), cp):
            return
    for schedule in _schedules(config, pp):
        for ep in _experts(config, left * cp):
            for zero in wishes.zeros if left * cp > 1 else (0,):
                if ep > 1 and zero in (1, 2):
                    continue
                if zero == 2 and pp > 1:
                    continue  # the schedule sums whole gradients anyway: zero 1 is the same with fewer collectives
                for shard in _shards(zero, left, cluster.node_size // (tp * cp)):
                    replicas: dict[str, Any] = {} if shard is None else {"dp_shard": shard}
                    yield Layout(**sizes, **schedule, **replicas, ep=ep, zero=zero)


def variants(layout: Layout, wishes: Wishes, kind: str) -> Iterator[Layout]:
    """Yield a mesh with each precision, activation policy and offload."""
    for precision in wishes.precisions:
        for policy in wishes.activations:
            if policy == "norms" and (kind != "cuda" or wishes.compile is False):
                continue  # only compiled blocks recompute norms
            policies: dict[str, Any] = {"recompute_norms": True} if policy == "norms" else {"activations": policy}
            for offload in (*wishes.offloads, *_on_disk(wishes)):
                alone = layout.zero == 0 and layout.tp == layout.cp == layout.ep == 1
                if offload != "none" and (layout.pp > 1 or not (layout.zero == 3 or alone)):
                    continue
                policies["compile"] = wishes.compile
                yield replace(layout, precision=precision, offload=offload, **policies)  # type: ignore[arg-type]


def _on_disk(wishes: Wishes) -> tuple[Offload, ...]:
    """Masters and states in files, if a folder is given and offload is looked at."""
    if wishes.disk is None or wishes.offloads == ("none",):
        return ()
    return (
        Offload(optimizer="disk", folder=wishes.disk),
        Offload(optimizer="disk", gradients="step", folder=wishes.disk),
    )


def micro_batches(workload: Workload, layout: Layout, wishes: Wishes) -> list[int]:
    """Return the sequences of a micro-batch to try: divisors of a rank's part of the batch that are powers of two."""
    mine = workload.batch // layout.data_size
    if wishes.sequences is not None:
        return [wishes.sequences] if mine % wishes.sequences == 0 else []
    sizes = [size for size in (2**power for power in range(_MOST_MICRO_BATCHES)) if mine % size == 0]
    if mine not in sizes and mine < 2**_MOST_MICRO_BATCHES and layout.pp == 1:
        sizes.append(mine)
    if layout.pp == 1:
        return sizes
    return [size for size in sizes if _pipeline_runs(layout, mine // size)]


def _pipeline_runs(layout: Layout, count: int) -> bool:
    from piledriver.engine.layout import check_microbatches

    return _allows(
        lambda: check_microbatches(layout.schedule, ranks=layout.pp, stages=layout.stages, microbatches=count), 2
    )


def with_micro_batches(layout: Layout, workload: Workload, sequences: int) -> Layout:
    """Return the layout with the number of pipeline micro-batches that gives micro-batches of this size."""
    if layout.pp == 1:
        return layout
    return replace(layout, microbatches=workload.batch // layout.data_size // sequences)


def _schedules(config: ModelConfig, pp: int) -> Iterator[dict[str, Any]]:
    if pp == 1:
        yield {}
        return
    yield {"schedule": "1f1b"}
    for per in (2, 4):
        if pp * per <= config.layers:
            yield {"schedule": "interleaved-1f1b", "stages_per_rank": per}


def _experts(config: ModelConfig, ranks: int) -> Iterator[int]:
    yield 1
    if config.moe is not None:
        yield from (
            size for size in _sizes(config.moe.experts) if size > 1 and config.moe.experts % size == 0 == ranks % size
        )


def _shards(zero: int, left: int, node: int) -> Iterator[int | None]:
    yield None
    if zero and 1 < node < left and left % node == 0:
        yield node
        if 1 < 4 * node < left and left % (4 * node) == 0:
            yield 4 * node


def _sizes(most: int) -> Iterator[int]:
    size = 1
    while size <= most:
        if most % size == 0 or size == 1:
            yield size
        size *= 2


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _allows(check: Any, size: int) -> bool:
    if size == 1:
        return True
    try:
        check()
    except PiledriverError:
        return False
    return True
