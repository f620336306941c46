"""Seconds of data-parallel communication that a step does not hide: reductions of gradients, gathers of parameters."""

from __future__ import annotations

from piledriver.engine.layout import MANY_STAGES_A_RANK
from piledriver.plan.blocks.parameters import Stage, shard_ranks
from piledriver.plan.memory.states import stage_states
from piledriver.plan.time.placed import Placed
from piledriver.plan.time.stage import StageSeconds

# Share of a device's units that the kernels of a collective occupy: what runs beside them is slower by that much.
_CONTENTION = 0.12


def exposed_seconds(placed: Placed, mine: list[tuple[Stage, StageSeconds]], rounds: int) -> float:
    """Return the seconds of a rank's data-parallel communication that are not hidden, over `rounds` micro-batches."""
    layout, traits = placed.layout, placed.setting.traits
    states = [stage_states(placed.config, stage, layout, placed.optimizer) for stage, _ in mine]
    block = max(one["block"].elements for one in states)
    ends = [one["embedding"].elements + one["head"].elements for one in states]
    total = sum(one["block"].elements * len(stage.blocks) for one, (stage, _) in zip(states, mine, strict=True))
    total += sum(ends)
    gradient_size = 4.0 if traits.fp32_gradients or not traits.master_copy else 2.0
    if layout.has_bf16_weights and layout.zero < 3:
        gradient_size = 4.0  # reduced in fp32
    hybrid = placed.collective("all-reduce", "dp_replicate", total * gradient_size / shard_ranks(layout))
    if layout.zero == 3 and placed.axes["dp_shard"].size > 1:
        sharded = sum(
            _fully_sharded(placed, one["block"].elements, end, stage, cost, rounds)
            for one, end, (stage, cost) in zip(states, ends, mine, strict=True)
        )
        return hybrid * (1 - traits.overlap) + sharded
    # Of several stages on a rank all but the last to finish reduce beside the last micro-batches of the others.
    times = max(1.0, layout.pp * (len(mine) - 1) / len(mine)) if layout.schedule in MANY_STAGES_A_RANK else 1.0
    backward = times * sum(cost.backward for _, cost in mine)
    last = block / max(total, 1.0)
    if layout.zero in (1, 2):
        kind = "reduce-scatter" if layout.zero == 2 or traits.master_copy else "all-reduce"
        reduce = placed.collective(kind, "dp_shard", total * gradient_size) + hybrid
        gather = placed.collective("all-gather", "dp_shard", total * placed.weight_size)
        forward = times * sum(cost.seconds - cost.backward for _, cost in mine)
        hidden = min(gather, forward) * (traits.overlap if traits.master_copy else 0.0)
        return _beyond(reduce, backward, last, traits.overlap) + gather - (1 - _CONTENTION) * hidden
    return _beyond(hybrid, backward, last, traits.overlap)


def _beyond(seconds: float, backward: float, last: float, overlap: float) -> float:
    """Return what the backward does not hide: all beyond its length, and the last bucket."""
    hidden = overlap * min(seconds * (1 - last), 0.9 * backward)
    return seconds - (1 - _CONTENTION) * hidden


def _fully_sharded(placed: Placed, block: float, ends: float, stage: Stage, cost: StageSeconds, rounds: int) -> float:
    """Zero 3: gather each block before its forward and its backward, reduce its gradients after."""
    layers = max(1, len(stage.blocks))
    size = placed.setting.itemsize
    gather = placed.collective("all-gather", "dp_shard", block * size)
    reduce = placed.collective("reduce-scatter", "dp_shard", block * 4)
    ends_gather = placed.collective("all-gather", "dp_shard", ends * size)
    ends_reduce = placed.collective("reduce-scatter", "dp_shard", ends * 4)
    backward = cost.backward / layers
    forward = (cost.seconds - cost.backward) / layers
    overlap = placed.setting.traits.overlap
    there = _beside(gather, overlap * forward)
    # Gradients are reduced in the last micro-batch only.
    back = _beside(gather, overlap * backward)
    last = _beside(gather + reduce, overlap * backward)
    if placed.layout.pp > 1:
        # Backwards leave their blocks gathered until the last one: each micro-batch gathers once.
        return rounds * layers * there + gather + layers * last + ends_gather + ends_reduce
    rounded = rounds * (layers * there + gather) + (rounds - 1) * layers * back + layers * last
    return rounded + rounds * ends_gather + ends_reduce


def _beside(seconds: float, compute: float) -> float:
    """Return what communication beside this much compute adds to a step."""
    hidden = min(seconds, compute)
    return seconds - (1 - _CONTENTION) * hidden
