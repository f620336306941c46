"""Numbers of a rank that advice rests on, per profiled window."""

from __future__ import annotations

import statistics
from typing import Any

from piledriver.observe.profile.collect import Notes
from piledriver.observe.profile.module_tree import Work
from piledriver.observe.profile.wall import Wall
from piledriver.observe.trace.attribution import Attribution
from piledriver.observe.trace.chrome import HostEvent, Trace
from piledriver.observe.trace.intervals import Intervals, intersect, length, subtract, union
from piledriver.observe.trace.operators import has_formula, matmul_precision

_SYNCHRONISE = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_READS = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
_SMALL_US = 10.0
_ACCUMULATES = ("torch::autograd::AccumulateGrad", "aten::add_")
_PRODUCTS = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}
_MATMULS = ("mm", "linear", "matmul", "convolution", "attention")
# A fused kernel reads the inputs of its run of operators once, and writes its results and what the backward needs.
_FUSED_KERNELS = 2.5


def collect_facts(
    trace: Trace, places: Attribution, window: tuple[float, float], wall: Wall, work: list[Work], notes: Notes
) -> dict[str, Any]:
    """Return the facts of a window; see the keys."""
    inside = [one for one in trace.kernels if window[0] <= one.start < window[1]]
    compute = [one for one in inside if not one.is_communication and one.kind == "kernel"]
    durations = [one.end - one.start for one in compute]
    facts: dict[str, Any] = {
        "device": notes.device,
        "kernels": len(compute),
        "kernel_median_us": statistics.median(durations) if durations else 0.0,
        "small_kernels": sum(one < _SMALL_US for one in durations),
        "operators": sum(one.calls for one in work),
        "optimizer": notes.optimizer,
        "compilations": notes.compilations,
        "compile_seconds": notes.compile_seconds,
        "compiled_modules": notes.compiled_modules,
        "allocator": notes.allocator,
        "batches": notes.batches,
        "peak_bytes": notes.peak_bytes,
        "reserved_bytes": notes.reserved_peak,
        "capacity_bytes": notes.capacity,
    }
    facts |= _products(work)
    facts["fused_seconds"] = _fused_seconds(trace, places, window)
    facts |= _small(work)
    facts["shapes"] = _shapes(trace, window)
    facts |= _synchronisations(trace, window, wall)
    facts |= _copies(trace, window)
    facts["malloc_seconds"] = _seconds(trace, window, ("cudaMalloc", "cudaFree"))
    facts["launch_seconds"] = _seconds(trace, window, ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC"))
    facts["optimizer_seconds"] = sum(one.seconds for one in work if one.place.phase == "optimizer")
    facts["optimizer_kernels"] = sum(one.kernels for one in work if one.place.phase == "optimizer")
    facts["optimizer_operators"] = sum(one.calls for one in work if one.place.phase == "optimizer")
    facts["optimizer_host_seconds"] = _annotated(trace, window, "Optimizer.step#")
    facts["accumulate_seconds"] = sum(
        one.seconds for one in work if one.operator in _ACCUMULATES and one.place.phase == "backward"
    )
    facts["backward_passes"] = _backward_passes(trace, window, notes)
    return facts


def _products(work: list[Work]) -> dict[str, Any]:
    """Return time and FLOPs of products by type, and of other operators; the largest shapes are the planner's."""
    by_type: dict[str, dict[str, float]] = {}
    other = unfused = recomputed = 0.0
    other_bytes = 0
    for one in work:
        if one.place.phase == "recomputed":
            recomputed += one.seconds
        if one.flops:
            row = by_type.setdefault(one.precision or "unknown", {"seconds": 0.0, "flops": 0.0, "calls": 0.0})
            row["seconds"] += one.seconds
            row["flops"] += one.flops
            row["calls"] += one.calls
        elif one.place.phase != "optimizer" and not any(word in one.operator for word in _MATMULS):
            other += one.seconds
            other_bytes += one.bytes
            if one.operator.startswith(("aten::_softmax", "aten::softmax")):
                unfused += one.seconds
    return {
        "products": by_type,
        "elementwise_seconds": other,
        "elementwise_bytes": other_bytes,
        "softmax_seconds": unfused,
        "recomputed_seconds": recomputed,
    }


def _fused_seconds(trace: Trace, places: Attribution, window: tuple[float, float]) -> float:
    """Return the device's time for operators without products, if each run of them between products were fused."""
    total = run = longest = 0.0
    for kernel in trace.kernels:
        if not window[0] <= kernel.start < window[1] or kernel.is_communication:
            continue
        if places.place(kernel.launch).phase == "optimizer" or _is_product(kernel.launch):
            total += min(run, _FUSED_KERNELS * longest)
            run = longest = 0.0
        else:
            run += kernel.end - kernel.start
            longest = max(longest, kernel.end - kernel.start)
    return (total + min(run, _FUSED_KERNELS * longest)) / 1e6


def _is_product(launch: HostEvent | None) -> bool:
    if launch is None:
        return False
    return any(
        one.kind == "cpu_op" and (has_formula(one.name) or any(word in one.name for word in _MATMULS))
        for one in launch.ancestors()
        if not one.name.startswith("module::")
    )


def _small(work: list[Work]) -> dict[str, Any]:
    """Return calls and time of operators whose calls are so short that their overhead is most of them."""
    small = [one for one in work if one.calls and one.seconds / one.calls < _SMALL_US * 2e-6 and not one.kernels]
    return {
        "small_operator_calls": sum(one.calls for one in small),
        "small_operator_seconds": sum(one.seconds for one in small),
    }


def _shapes(trace: Trace, window: tuple[float, float], most: int = 64) -> list[dict[str, Any]]:
    """Return matrix products by shape and type: how often, how long, how many FLOPs; the longest first."""
    on_device: dict[int, float] = {}
    for kernel in trace.kernels:
        if window[0] <= kernel.start < window[1] and kernel.launch is not None:
            for event in kernel.launch.ancestors():
                if event.name in _PRODUCTS:
                    on_device[id(event)] = on_device.get(id(event), 0.0) + kernel.end - kernel.start
                    break
    found: dict[tuple[int, int, int, int, str], dict[str, Any]] = {}
    for event in trace.host_events():
        first = _PRODUCTS.get(event.name)
        dims = event.args.get("Input Dims")
        if first is None or not dims or not window[0] <= event.start < window[1]:
            continue
        left, right = dims[first], dims[first + 1]
        if len(left) < 2 or len(right) < 2:
            continue
        groups = left[0] if len(left) == 3 else 1
        key = (left[-2], right[-1], left[-1], groups, str(matmul_precision(event)))
        row = found.setdefault(key, {"calls": 0, "seconds": 0.0})
        row["calls"] += 1
        row["seconds"] += (on_device.get(id(event), 0.0) if trace.kernels else event.duration) / 1e6
    rows = [
        {"m": m, "n": n, "k": k, "groups": groups, "precision": precision, **row}
        for (m, n, k, groups, precision), row in found.items()
    ]
    return sorted(rows, key=lambda row: -float(row["seconds"]))[:most]


def _synchronisations(trace: Trace, window: tuple[float, float], wall: Wall) -> dict[str, Any]:
    """Return how often the host waited for the device within the window, and the device's idle time right after."""
    found: list[HostEvent] = []
    names: dict[str, int] = {}
    for event in trace.host_events():
        if not window[0] <= event.start < window[1] - 1:
            continue
        if event.name in _SYNCHRONISE or (event.name == "cudaMemcpyAsync" and event.duration > 50):
            reader = next((one.name for one in event.ancestors() if one.name in _READS), None)
            if any(one.name.startswith("region::profiler") for one in event.ancestors()):
                continue
            found.append(event)
            names[reader or event.name] = names.get(reader or event.name, 0) + 1
    # The last one is the profile's own, which ends the window.
    last = max(found, key=lambda one: one.end, default=None)
    if last is not None and window[1] - last.end < 2000 and last.name == "cudaDeviceSynchronize":
        found.remove(last)
        names[last.name] -= 1
    idle: Intervals = subtract([window], union((one.start, one.end) for one in trace.kernels)) if trace.kernels else []
    after = union((one.end, one.end + 300.0) for one in found)
    return {
        "synchronisations": len(found),
        "synchronised_by": {name: count for name, count in names.items() if count > 0},
        "synchronised_seconds": sum(one.duration for one in found) / 1e6,
        "idle_after_synchronisation": length(intersect(idle, after)) / 1e6,
    }


def _copies(trace: Trace, window: tuple[float, float]) -> dict[str, Any]:
    pageable = pinned = 0.0
    for one in trace.kernels:
        if one.kind == "gpu_memcpy" and window[0] <= one.start < window[1] and "HtoD" in one.name:
            if "Pageable" in one.name:
                pageable += one.end - one.start
            else:
                pinned += one.end - one.start
    return {"pageable_copy_seconds": pageable / 1e6, "pinned_copy_seconds": pinned / 1e6}


def _backward_passes(trace: Trace, window: tuple[float, float], notes: Notes) -> float:
    """Return the backward passes of the window: how often each gradient was accumulated."""
    count = sum(
        one.name == "torch::autograd::AccumulateGrad" and window[0] <= one.start < window[1]
        for one in trace.host_events()
    )
    return count / max(1, int(notes.optimizer.get("parameters", 1)))


def _seconds(trace: Trace, window: tuple[float, float], names: tuple[str, ...]) -> float:
    return (
        sum(one.duration for one in trace.host_events() if one.name in names and window[0] <= one.start < window[1])
        / 1e6
    )


def _annotated(trace: Trace, window: tuple[float, float], prefix: str) -> float:
    return (
        sum(
            one.duration
            for one in trace.host_events()
            if one.name.startswith(prefix) and window[0] <= one.start < window[1]
        )
        / 1e6
    )
