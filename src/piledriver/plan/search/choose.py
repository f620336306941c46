"""Rank candidates by predicted time among those that fit; say of every other one why it lost."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from piledriver.core.errors import PiledriverError
from piledriver.engine.layout import Layout
from piledriver.plan.errors import PlanError
from piledriver.plan.hardware.cluster import Cluster
from piledriver.plan.prediction import Prediction, Workload, predict_memory, with_time
from piledriver.plan.search.candidates import Wishes, meshes, micro_batches, variants, with_micro_batches
from piledriver.plan.search.uneven import uneven_stages
from piledriver.plan.time.rates import Efficiency

_GIB = 2**30
# A simpler layout is chosen unless another is faster by more than this share.
_TIE = 0.015


@dataclass(frozen=True, slots=True)
class Loser:
    """A layout that was not chosen, and the reason with its number."""

    layout: Layout
    sequences: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The outcome of a search: what fits, fastest first, and what does not, smallest first."""

    fitting: list[Prediction]
    too_large: list[Prediction]
    """The smallest micro-batch of each layout that does not fit, without its time."""
    counted: int
    """Layouts and micro-batches that were looked at."""

    def losers(self, count: int | None = None) -> list[Loser]:
        """Return every layout but the best with its reason, the nearest first."""
        found = []
        for one in self.fitting[1:count]:
            found.append(Loser(one.layout, one.sequences, reason_slower(one, self.fitting[0])))
        for one in self.too_large[: None if count is None else max(0, count - len(found))]:
            found.append(Loser(one.layout, one.sequences, reason_too_large(one)))
        return found


def reason_slower(one: Prediction, best: Prediction) -> str:
    """Return why a layout that fits was not chosen: the part of the step that costs more, or that it is less simple."""
    from piledriver.plan.time.step import PARTS

    share = one.time.total / best.time.total - 1
    if share < 0:
        return f"{-100 * share:.1f}% faster, but less simple, which must gain more than {100 * _TIE:.1f}%"
    more = {name: getattr(one.time, name) - getattr(best.time, name) for name in PARTS}
    part = max(more, key=lambda name: more[name])
    if more[part] <= 0:
        return "as fast, and less simple: 0.0 ms a step"
    return f"{100 * share:.1f}% slower: {NAMES[part]} takes {step_duration(more[part])} more a step"


def step_duration(seconds: float) -> str:
    """Return seconds in a unit that suits them.

    >>> step_duration(0.0123), step_duration(75.0), step_duration(7200.0)
    ('12.3 ms', '75.0 s', '2.0 h')
    """
    if seconds < 10:
        return f"{1e3 * seconds:,.1f} ms"
    return f"{seconds:,.1f} s" if seconds < 3600 else f"{seconds / 3600:,.1f} h"


NAMES = {
    "compute": "compute",
    "recompute": "recomputation",
    "tensor": "tp, cp and ep communication",
    "data": "data-parallel communication",
    "bubble": "the pipeline bubble",
    "send": "sends between stages",
    "optimizer": "the optimizer",
    "offload": "offload",
    "host": "the host",
}


def reason_too_large(one: Prediction) -> str:
    """Return by how much a layout does not fit, and what takes the most."""
    timeline = one.tightest
    if one.missing <= 0:
        there = one.cluster.host.memory / _GIB
        return f"needs {timeline.host / _GIB:.0f} GiB of host memory a device, which has {there:.0f}"
    owner = timeline.largest(1)[0]
    return (
        f"{one.missing / _GIB:.1f} GiB too large on {timeline.rank} in phase '{timeline.peak.name}' "
        f"({owner.name}: {owner.bytes / _GIB:.1f} GiB)"
    )


def search_layouts(
    workload: Workload, cluster: Cluster, wishes: Wishes | None = None, *, efficiency: Efficiency | None = None
) -> Search:
    """Return every layout that the model, the batch and the cluster allow, ranked."""
    wishes = wishes or Wishes()
    if "none" in wishes.offloads and len(wishes.offloads) > 1:
        # Offload costs time and saves memory: it is looked at only where nothing fits without.
        found = search_layouts(workload, cluster, replace(wishes, offloads=("none",)), efficiency=efficiency)
        if found.fitting:
            return found
        more = replace(wishes, offloads=tuple(one for one in wishes.offloads if one != "none"))
        other = search_layouts(workload, cluster, more, efficiency=efficiency)
        too_large = sorted([*found.too_large, *other.too_large], key=lambda one: one.missing)
        return replace(other, too_large=too_large, counted=found.counted + other.counted)
    with _without_collector():
        return _search(workload, cluster, wishes, efficiency)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause the cycle collector: predictions have no cycles, and it would visit all of them again and again."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _search(workload: Workload, cluster: Cluster, wishes: Wishes, efficiency: Efficiency | None) -> Search:
    fitting: list[Prediction] = []
    too_large = []
    counted = 0
    memo: dict[Any, Any] = {}
    for layout in _layouts(workload, cluster, wishes):
        sizes = micro_batches(workload, layout, wishes)
        if not sizes:
            continue
        # Memory grows with the micro-batch: stop at the first that does not fit.
        for position, size in enumerate(sizes):
            counted += 1
            placed = with_micro_batches(layout, workload, size)
            uneven = uneven_stages(workload, placed, cluster, sequences=size, efficiency=efficiency)
            if uneven is not None:
                counted += 1
                by_speed = predict_memory(workload, uneven, cluster, sequences=size)
                if by_speed.fits:
                    fitting.append(with_time(by_speed, efficiency=efficiency, memo=memo))
            memory = predict_memory(workload, placed, cluster, sequences=size, largest_only=True)
            if not memory.fits and uneven is not None:
                continue
            if not memory.fits:
                if position == 0:
                    too_large.append(memory)
                break
            fitting.append(with_time(memory, efficiency=efficiency, memo=memo))
    fitting.sort(key=lambda one: (one.time.total, complexity(one.layout)))
    too_large.sort(key=lambda one: one.missing)
    return Search(fitting=_simplest_first(fitting), too_large=too_large, counted=counted)


def _layouts(workload: Workload, cluster: Cluster, wishes: Wishes) -> Iterator[Layout]:
    kind = cluster.device.kind
    if wishes.fixed is not None:
        yield wishes.fixed.on(cluster.count)
        return
    for mesh in meshes(workload, cluster, wishes):
        try:
            resolved = mesh.on(cluster.count)
        except PiledriverError:
            continue
        for layout in variants(resolved, wishes, kind):
            # Only offload adds conditions on the number of devices.
            if not layout.offloads or _runs_on(layout, cluster.count):
                yield layout


def _runs_on(layout: Layout, count: int) -> bool:
    try:
        layout.on(count)
    except PiledriverError:
        return False
    return True


def complexity(layout: Layout) -> tuple[int, ...]:
    """Return a key that is smaller for simpler layouts: of two equally fast ones, the simpler is chosen."""
    return (
        layout.pp > 1,
        layout.ep > 1,
        layout.cp > 1,
        layout.tp > 1,
        layout.offload != "none",
        {"keep": 0, "selective": 1, "budget": 2, "full": 3}[layout.activations] + layout.recompute_norms,
        layout.zero,
        layout.pp,
        layout.tp,
    )


def _simplest_first(fitting: list[Prediction]) -> list[Prediction]:
    if not fitting:
        return fitting
    limit = fitting[0].time.total * (1 + _TIE)
    near = [one for one in fitting if one.time.total <= limit]
    best = min(near, key=lambda one: complexity(one.layout))
    return [best, *(one for one in fitting if one is not best)]


def smallest_changes(workload: Workload, cluster: Cluster, wishes: Wishes, count: int = 3) -> list[str]:
    """Return the smallest changes that make a model fit where nothing does: optimizer, batch, length, devices."""
    found: list[str] = []

    def tries(description: str, changed: Workload, on: Cluster, allowed: Wishes) -> bool:
        try:
            fits = any_fits(changed, on, allowed)
        except PlanError:
            return False
        if fits:
            found.append(description)
        return fits

    if "bf16-pure" not in wishes.precisions:
        pure = replace(wishes, precisions=(*wishes.precisions, "bf16-pure"))
        small = replace(workload, optimizer="adamw_split_bf16")
        tries("optimizer adamw_split_bf16 with precision bf16-pure", small, cluster, pure)
    batch = workload.batch // 2
    while batch >= 1:
        # Fewer micro-batches: zero 2 and 3 sum their gradients whole until the last one.
        if tries(f"a batch of {batch} sequences", replace(workload, batch=batch), cluster, wishes):
            break
        batch //= 2
    length = workload.length // 2
    while length >= 256:
        if tries(f"sequences of {length} tokens", replace(workload, length=length), cluster, wishes):
            break
        length //= 2
    factor = 2
    while factor <= 4096:
        more = cluster.resized(cluster.count * factor)
        what = f"{more.name} ({factor} times the devices)"
        if tries(what, workload, more, wishes):
            break
        larger = replace(workload, batch=more.count)
        if workload.batch < more.count and tries(f"{what} and {more.count} sequences", larger, more, wishes):
            break
        factor *= 2
    if len(found) < count:
        small = replace(workload, optimizer="adamw8bit")
        tries("optimizer adamw8bit", small, cluster, wishes)
    if len(found) < count:
        found += _larger_machines(workload, cluster, wishes)
    layers = workload.config.layers // 2
    while len(found) < count and layers >= 1:
        fewer = replace(workload.config, layers=layers, full_attention_layers=())
        if tries(f"a model with {layers} layers", replace(workload, config=fewer), cluster, wishes):
            break
        layers //= 2
    return found[:count]


def _larger_machines(workload: Workload, cluster: Cluster, wishes: Wishes) -> Iterator[str]:
    """Yield the memory of a device, and of a host, that would be enough."""
    every = list(smallest_memory(workload, cluster, wishes))
    device = [one for one in every if one.layout.offload == "none"]
    if device:
        memory = (cluster.smallest_memory + max(0.0, min(one.missing for one in device))) / _GIB
        yield f"devices with {memory:.0f} GiB instead of {cluster.smallest_memory / _GIB:.0f}"
    host = [one.worst.host for one in every if one.layout.offload != "none" and one.missing <= 0]
    if host:
        there = cluster.host.memory / _GIB
        yield f"hosts with {min(host) / _GIB:.0f} GiB a device instead of {there:.0f}, and offload"


def any_fits(workload: Workload, cluster: Cluster, wishes: Wishes) -> bool:
    """Return whether some layout fits with its smallest micro-batch."""
    return any(one.fits for one in smallest_memory(workload, cluster, wishes))


def smallest_memory(workload: Workload, cluster: Cluster, wishes: Wishes) -> Iterator[Prediction]:
    """Yield the memory of every layout with its smallest micro-batch, and with full recomputation where allowed."""
    if "full" in wishes.activations:
        wishes = replace(wishes, activations=("full",))
    for layout in _layouts(workload, cluster, wishes):
        for size in micro_batches(workload, layout, wishes)[:1]:
            placed = with_micro_batches(layout, workload, size)
            yield predict_memory(workload, placed, cluster, sequences=size)
