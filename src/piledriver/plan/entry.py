"""`plan`: choose the layout of a model on hardware. `auto_layout`: the layout alone, for `Layout.auto`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from piledriver.engine.layout import Layout
from piledriver.models.config import ModelConfig
from piledriver.plan.errors import PlanError
from piledriver.plan.hardware.cluster import Cluster
from piledriver.plan.hardware.parse import parse_hardware
from piledriver.plan.model_config import config_of
from piledriver.plan.prediction import Prediction, Workload, predict, predict_memory
from piledriver.plan.result import Plan
from piledriver.plan.search.candidates import Wishes, divisors, with_micro_batches
from piledriver.plan.search.choose import reason_too_large, search_layouts, smallest_changes
from piledriver.plan.search.valid import check_layout_of_model
from piledriver.plan.time.rates import Efficiency

# Tokens of one optimizer step where none are given.
_BATCH_TOKENS = 2**19
_SHOWN = 5


def plan(
    model: Any,
    batch: int | None = None,
    hardware: str | Cluster = "here",
    *,
    length: int | None = None,
    optimizer: str = "adamw",
    wishes: Wishes | None = None,
    efficiency: Efficiency | None = None,
) -> Plan:
    """Return the fastest layout that fits, with its prediction.

    `model` is a `ModelConfig`, a preset, a folder of a Hugging Face model, or a `Transformer`; `batch` counts the
    sequences of one optimizer step over all ranks (default: about half a million tokens), `length` their tokens.
    Raises `PlanError` if nothing fits, with the smallest changes that do.

    >>> made = plan("llama-3-8b", batch=64, hardware="8xh100-80g")
    >>> made.layout.zero, made.best.fits
    (3, True)
    """
    config, name = config_of(model)
    cluster = parse_hardware(hardware) if isinstance(hardware, str) else hardware
    workload = make_workload(config, batch, cluster, length=length, optimizer=optimizer)
    wishes = wishes or Wishes(precisions=("fp32",) if cluster.device.kind == "cpu" else ("bf16",))
    found = search_layouts(workload, cluster, wishes, efficiency=efficiency)
    if not found.fitting:
        nearest = found.too_large[0] if found.too_large else None
        raise PlanError(_nothing_fits(name, cluster, workload, nearest), fix=_changes(workload, cluster, wishes))
    best, *others = found.fitting
    return Plan(
        name=name,
        best=_every_rank(best),
        others=tuple(map(_every_rank, _distinct(others, best)[: _SHOWN - 1])),
        losers=tuple(found.losers()),
        counted=found.counted,
    )


def explain(
    model: Any,
    layout: Layout,
    batch: int | None = None,
    hardware: str | Cluster = "here",
    *,
    length: int | None = None,
    optimizer: str = "adamw",
    sequences: int | None = None,
) -> Prediction:
    """Return the prediction of one layout; `sequences` of a micro-batch default to the largest that fits."""
    config, _ = config_of(model)
    cluster = parse_hardware(hardware) if isinstance(hardware, str) else hardware
    workload = make_workload(config, batch, cluster, length=length, optimizer=optimizer)
    resolved = layout.on(cluster.count)
    check_layout_of_model(config, resolved)
    if workload.batch % resolved.data_size:
        raise PlanError(
            f"a batch of {workload.batch} sequences is not a multiple of {resolved.data_size} data-parallel ranks",
            fix=f"use {max(1, round(workload.batch / resolved.data_size)) * resolved.data_size}",
        )
    own = workload.batch // resolved.data_size
    if layout.pp > 1 and layout.microbatches is not None:
        sequences = _sequences_of(layout.microbatches, own, sequences)
    if sequences is not None and own % sequences:
        raise PlanError(
            f"micro-batches of {sequences} do not divide the {own} sequences of a data-parallel rank",
            fix=f"use one of {', '.join(map(str, divisors(own)))}, or another batch",
        )
    if sequences is not None:
        return predict(workload, with_micro_batches(resolved, workload, sequences), cluster, sequences=sequences)
    wishes = Wishes(precisions=(layout.precision,), fixed=layout)
    found = search_layouts(workload, cluster, replace(wishes, offloads=("none",)))
    if found.fitting:
        return _every_rank(found.fitting[0])
    return predict(workload, with_micro_batches(resolved, workload, 1), cluster, sequences=1)


def _sequences_of(microbatches: int, own: int, sequences: int | None) -> int:
    """Return the sequences of a micro-batch where a layout gives the number of micro-batches of a rank."""
    if own % microbatches:
        raise PlanError(
            f"microbatches={microbatches} does not divide the {own} sequences of a data-parallel rank",
            fix=f"use one of {', '.join(map(str, divisors(own)))}, or another batch",
        )
    if sequences not in (None, own // microbatches):
        raise PlanError(
            f"{microbatches} micro-batches of {sequences} are not the {own} sequences of a data-parallel rank",
            fix="give microbatches or the sequences of a micro-batch, not both",
        )
    return own // microbatches


def longest_fitting_length(
    model: Any, layout: Layout, hardware: str | Cluster = "here", *, optimizer: str = "adamw", sequences: int = 1
) -> int:
    """Return the most tokens of a sequence with which micro-batches of `sequences` fit, a multiple of 128 and of 2 cp.

    >>> longest_fitting_length("llama-3-8b", Layout(zero=3, precision="bf16"), "8xh100-80g") > 8192
    True
    """
    config, name = config_of(model)
    cluster = parse_hardware(hardware) if isinstance(hardware, str) else hardware
    resolved = layout.on(cluster.count)
    check_layout_of_model(config, resolved)
    step = math.lcm(128, 2 * layout.cp)
    micro = resolved.microbatches or 2 * resolved.stages if resolved.pp > 1 else 1

    def fits(count: int) -> bool:
        batch = resolved.data_size * sequences * micro
        workload = Workload(config=config, length=count * step, batch=batch, optimizer=optimizer)
        return predict_memory(workload, resolved, cluster, sequences=sequences).fits

    if not fits(1):
        raise PlanError(f"{name} does not fit on {cluster.name} even with {step} tokens", fix="use another layout")
    low, high = 1, 2
    most = config.max_positions // step if config.positions == "learned" else 2**20
    while high < most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step


def auto_layout(model: Any, **settings: Any) -> Layout:
    """Return the layout of `plan`: what `Layout.auto` calls."""
    return plan(model, **settings).layout


def make_workload(
    config: ModelConfig,
    batch: int | None,
    cluster: Cluster,
    *,
    length: int | None = None,
    optimizer: str = "adamw",
) -> Workload:
    """Return the workload with its defaults: the model's longest sequence, and about half a million tokens a step."""
    length = config.max_positions if length is None else length
    if length > config.max_positions and config.positions == "learned":
        raise PlanError(
            f"sequences of {length} tokens are longer than the model's max_positions {config.max_positions}",
            fix=f"use {config.max_positions}",
        )
    if batch is None:
        batch = max(1, _BATCH_TOKENS // length // cluster.count) * cluster.count
    if batch < 1 or length < 1:
        raise PlanError(f"a batch of {batch} sequences of {length} tokens is empty", fix="give 1 or more of both")
    return Workload(config=config, length=length, batch=batch, optimizer=optimizer)


def _every_rank(one: Prediction) -> Prediction:
    """Return a prediction of the search with the timelines of all kinds of ranks."""
    whole = predict_memory(one.workload, one.layout, one.cluster, sequences=one.sequences)
    return replace(one, timelines=whole.timelines)


def _distinct(others: list[Prediction], best: Prediction) -> list[Prediction]:
    """Return predictions whose meshes differ: of one mesh the fastest."""
    found, seen = [], {_mesh(best)}
    for one in others:
        if _mesh(one) not in seen:
            seen.add(_mesh(one))
            found.append(one)
    return found


def _mesh(one: Prediction) -> tuple[Any, ...]:
    layout = one.layout
    return layout.zero, layout.tp, layout.pp, layout.cp, layout.ep, layout.dp_shard, layout.activations, layout.offload


def _nothing_fits(name: str, cluster: Cluster, workload: Workload, nearest: Prediction | None) -> str:
    if nearest is None:
        return (
            f"no layout of {name} divides {cluster.count} devices and a batch of {workload.batch} sequences; "
            "the number of data-parallel ranks must divide the batch"
        )
    return f"{name} does not fit on {cluster.name}: the nearest is {nearest.layout!r}, {reason_too_large(nearest)}"


def _changes(workload: Workload, cluster: Cluster, wishes: Wishes) -> str:
    changes = smallest_changes(workload, cluster, wishes)
    return "; or ".join(changes) or f"use a batch that is a multiple of {cluster.count}"
