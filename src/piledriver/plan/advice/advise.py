"""`advise`: what to change first, by the planner's prediction of each change."""

from __future__ import annotations

from collections.abc import Callable

from piledriver.observe.report.values import Advice, ReportValues
from piledriver.plan.advice import device, inputs, memory, ranks
from piledriver.plan.advice.case import Case
from piledriver.plan.hardware.cluster import Cluster

RULES: tuple[Callable[[Case], Advice | None], ...] = (
    inputs.slow_loader,
    inputs.slow_tokeniser,
    inputs.checkpoint_stall,
    inputs.tracker_cost,
    inputs.padding_waste,
    inputs.blocked_thread,
    device.host_synchronisation,
    device.tiny_kernels,
    device.fp32_products,
    device.fp64_products,
    device.not_compiled,
    device.recompilation,
    device.unfused_attention,
    device.slow_optimizer,
    device.pageable_copies,
    device.unaligned_shapes,
    memory.fragmentation,
    memory.small_micro_batches,
    memory.needless_recomputation,
    ranks.small_buckets,
    ranks.straggler,
    ranks.exposed_communication,
)
"""Every rule; each returns advice with the number it rests on, or None."""


def advise(report: ReportValues, cluster: Cluster | None = None) -> list[Advice]:
    """Return advice for a report, the largest predicted gain first.

    Each prediction is of that change alone. A step is compared without the profiler where that was measured.
    """
    if cluster is None:
        from piledriver.plan.hardware.here import detect_cluster

        cluster = detect_cluster(len(report.ranks))
    case = Case(report, cluster)
    found = [advice for rule in RULES if (advice := rule(case)) is not None]
    return sorted(found, key=lambda one: one.predicted_seconds)
