"""Rules about memory: fragmentation, micro-batches, recomputation that is not needed."""

from __future__ import annotations

from piledriver.observe.memory.peak import PeakMemory
from piledriver.observe.memory.use import readable
from piledriver.observe.report.values import Advice
from piledriver.plan.advice.case import Case, milliseconds, share

_SHORT_US = 10.0
_GROWS = ("activation", "recomputed activation", "activation gradient", "loss", "workspace", "batch")


def fragmentation(case: Case) -> Advice | None:
    """The allocator asks the device for memory again and again."""
    counts = case.facts.get("allocator", {})
    calls = (counts.get("device_mallocs", 0) + counts.get("device_frees", 0)) / case.rank.steps
    seconds = case.per_step("malloc_seconds")
    if not calls:
        return None
    unused = max(0, int(case.facts.get("reserved_bytes", 0)) - int(case.facts.get("peak_bytes", 0)))
    return case.advice(
        "memory fragmentation",
        "let the allocator grow its segments",
        f"{calls:.0f} allocations and releases of device memory a step take {milliseconds(seconds)} "
        f"({share(seconds, case.step)}); {readable(unused)} are reserved and unused, "
        f"{counts.get('retries', 0)} retries",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True; no empty_cache() in the loop; batches of one shape",
        # Releasing memory waits for the device, which is not saved.
        max(case.step - seconds, case.seconds("compute") + case.seconds("exposed_communication")),
    )


def small_micro_batches(case: Case) -> Advice | None:
    """A step is accumulated from more micro-batches than memory needs."""
    calls = case.micro_batches
    if calls < 2:
        return None
    merged = _largest_merge(case, calls)
    if merged < 2:
        return None
    rows = case.facts.get("shapes", ())
    saved = sum(row["seconds"] - row["calls"] * case.merged_seconds(row, merged) for row in rows) / case.rank.steps
    # What costs the same for each micro-batch: launches, small operators, Python; and adding gradients up.
    adding = case.per_step("accumulate_seconds") * (1 - 1 / calls)
    if case.on_device:
        host = case.seconds("host_wait") + case.seconds("idle")
        # Kernels shorter than their launch take as long for a larger micro-batch.
        short = float(case.facts.get("kernel_median_us", 0.0)) < _SHORT_US
        same = max(0.0, case.per_step("elementwise_seconds") - case.per_step("accumulate_seconds")) if short else 0.0
        predicted = case.step - saved - adding - (host + same) * (1 - 1 / merged)
    else:
        fixed = case.per_step("small_operator_seconds") + case.rank.seconds["host_wait"] / case.rank.steps
        predicted = case.without(saved + adding + fixed * (1 - 1 / merged))
    return case.advice(
        "micro-batch",
        f"use micro-batches {merged} times as large",
        f"{calls:.0f} micro-batches a step of {case.batches.get('samples', calls) / calls:.0f} sample(s) each; "
        f"the peak is {_peak_text(case)}",
        f"batch size times {merged}, gradient_accumulation_steps divided by {merged}",
        predicted,
    )


def _largest_merge(case: Case, calls: float) -> int:
    """Return how many micro-batches fit into memory together, at most all of a step."""
    peak = _device_peak(case)
    capacity = float(peak.capacity) if peak is not None and peak.capacity else float(case.cluster.device.memory)
    if peak is None:
        return int(calls)
    sizes = peak.by_category()
    growing = sum(sizes.get(name, 0) for name in _GROWS)
    fits = (0.85 * capacity - (peak.bytes - growing)) / growing if growing else calls
    return max(1, min(int(calls), int(fits)))


def needless_recomputation(case: Case) -> Advice | None:
    """Activations are recomputed although they would fit."""
    seconds = case.per_step("recomputed_seconds")
    peak = _device_peak(case)
    if not seconds or peak is None or not peak.capacity:
        return None
    forward = sum(row.seconds["forward"] for row in case.rank.modules if row.path == "model")
    kept = peak.by_category().get("activation", 0) + peak.by_category().get("recomputed activation", 0)
    blocks = max(1, sum(row.path.count(".") == 2 for row in case.rank.modules))
    if not forward or peak.bytes + kept * blocks > 0.85 * peak.capacity:
        return None
    return case.advice(
        "needless recomputation",
        "keep activations, memory is free",
        f"recomputation takes {milliseconds(seconds)} of a step ({share(seconds, case.step)}) while the peak is "
        f"{_peak_text(case)}",
        'Layout(activations="keep"), or checkpoint only every second block',
        case.step - seconds,
    )


def _device_peak(case: Case) -> PeakMemory | None:
    return case.rank.memory[0] if case.rank.memory else None


def _peak_text(case: Case) -> str:
    peak = _device_peak(case)
    if peak is None:
        return "unknown"
    return readable(peak.bytes) + (f" of {readable(peak.capacity)}" if peak.capacity else "")
