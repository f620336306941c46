"""A plan as text: the choice with its arithmetic, the runners-up, and why others lost."""

from __future__ import annotations

from collections.abc import Iterator

from piledriver.models.model_size import parameter_count, short_count
from piledriver.observe.memory import readable
from piledriver.plan.prediction import Prediction, Workload
from piledriver.plan.result import Plan, layout_mapping
from piledriver.plan.search.choose import NAMES, Loser, step_duration
from piledriver.plan.time.step import PARTS

_SHOWN_LOSERS = 6


def plan_text(plan: Plan, *, budget_tokens: float | None = None) -> str:
    """Return the report of a plan."""
    workload = plan.workload
    head = (
        f"{plan.name} ({short_count(parameter_count(workload.config))} parameters) on {plan.cluster.name}, "
        f"{workload.batch} x {workload.length} tokens a step, {workload.optimizer}; {plan.counted} layouts compared"
    )
    lines = [
        head,
        *_batch_lines(workload, plan.cluster.count),
        "",
        *prediction_lines(plan.best),
        "",
        *_table([plan.best, *plan.others]),
    ]
    if plan.losers:
        lines += ["", "why others lost:"]
        lines += [
            f"  {_short(one.layout)} x{one.sequences}: {one.reason}"
            for one in _spread(list(plan.losers), _SHOWN_LOSERS)
        ]
    if budget_tokens is not None:
        days = budget_tokens / plan.tokens_per_second / 86400
        lines += ["", f"{budget_tokens:.3g} tokens: {days:.2f} days, {plan.best.dollars(budget_tokens):,.0f} dollars"]
    return "\n".join(lines)


def _batch_lines(workload: Workload, count: int) -> Iterator[str]:
    """Yield what a batch that the devices do not divide rules out, and the nearest that they do."""
    if workload.batch % count:
        below = workload.batch // count * count
        sizes = [f"{size} ({size * workload.length} tokens)" for size in (below, below + count) if size]
        yield (
            f"{workload.batch} sequences are not a multiple of {count} devices, which rules layouts out; "
            f"{' or '.join(sizes)} would allow all"
        )


def prediction_lines(one: Prediction) -> Iterator[str]:
    """Yield the arithmetic of one layout: memory by phase, the owners of the peak, seconds by cause."""
    timeline = one.worst
    yield f"layout: {layout_mapping(one.layout)}"
    yield (
        f"  micro-batches of {one.sequences} sequences, {one.accumulation} a step and rank, "
        f"{'compiled' if one.compiled else 'eager'}; micro_batch_tokens={one.micro_batch_tokens}"
    )
    yield (
        f"memory on {timeline.rank}: {readable(timeline.allocated)} allocated, {readable(timeline.reserved)} reserved, "
        f"{readable(timeline.driver)} shown by the driver, of {readable(one.capacity)}"
        + (f"; {readable(timeline.host)} of host memory" if timeline.host else "")
        + (f"; {readable(timeline.disk)} on disk" if timeline.disk else "")
    )
    for phase in timeline.phases:
        parts = sorted(phase.by_category().items(), key=lambda item: -item[1])
        named = ", ".join(f"{name} {readable(size)}" for name, size in parts[:4] if size > 0)
        mark = "  <- peak" if phase is timeline.peak else ""
        yield f"  {phase.name:<24} {readable(phase.bytes):>10}  ({named}){mark}"
    largest = ", ".join(f"{owner.name} {readable(owner.bytes)}" for owner in timeline.largest())
    yield f"  largest at the peak: {largest}"
    if not one.time.total:
        return
    yield (
        f"time: {step_duration(one.time.total)} a step, {one.tokens_per_second:,.0f} tokens/s "
        f"({one.tokens_per_second / one.cluster.count:,.0f} a device), MFU {100 * one.mfu:.1f}%, "
        f"{one.joules_per_token:.3g} J and {one.dollars(1e9) / 1e9:.3g} dollars a token"
    )
    parts = [(name, getattr(one.time, name)) for name in PARTS if getattr(one.time, name) > 0]
    yield "  " + ", ".join(f"{NAMES[name]} {step_duration(seconds)}" for name, seconds in parts)


def collective_lines(one: Prediction) -> Iterator[str]:
    """Yield the collectives of a step on the first rank, by kind and axis."""
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    for call in one.collectives():
        count, size = totals.get((call.kind, call.axis), (0, 0.0))
        totals[call.kind, call.axis] = count + call.count, size + call.count * call.bytes
    if totals:
        yield "collectives of a step on rank 0:"
    for (kind, axis), (count, size) in sorted(totals.items(), key=lambda item: -item[1][1]):
        yield f"  {kind} over {axis}: {count} calls, {readable(size)}"


def _table(predictions: list[Prediction]) -> Iterator[str]:
    yield f"{'tokens/s':>12} {'MFU':>6} {'GiB':>7}  layout"
    for one in predictions:
        size = one.worst.allocated / 2**30
        yield (
            f"{one.tokens_per_second:>12,.0f} {100 * one.mfu:>5.1f}% {size:>7.1f}  {_short(one.layout)} "
            f"micro-batch {one.sequences} x {one.accumulation}"
        )


def _short(layout: object) -> str:
    text = repr(layout).removeprefix("Layout(").removesuffix(")")
    return text.replace("dp_replicate=1, ", "").replace("dp_shard=1, ", "")


def _spread(items: list[Loser], count: int) -> list[Loser]:
    """Return a few items from the whole list: the nearest, then ever farther ones."""
    if len(items) <= count:
        return items
    places = sorted({round((len(items) - 1) * (number / (count - 1)) ** 2) for number in range(count)})
    return [items[place] for place in places]
