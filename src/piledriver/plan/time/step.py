"""Seconds of one optimizer step on a layout: compute, communication that is not hidden, bubbles, optimizer, offload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from piledriver.engine.layout import MANY_STAGES_A_RANK, SPLIT_BACKWARD, TWO_STAGES_A_RANK, Layout
from piledriver.models.config import ModelConfig
from piledriver.plan.blocks.parameters import Stage
from piledriver.plan.blocks.setting import PILEDRIVER, Traits, setting_of
from piledriver.plan.hardware.cluster import Cluster
from piledriver.plan.time.data_parallel import exposed_seconds
from piledriver.plan.time.optimizer import optimizer_seconds
from piledriver.plan.time.placed import Placed
from piledriver.plan.time.rank_kinds import rank_kinds
from piledriver.plan.time.rates import Efficiency
from piledriver.plan.time.stage import StageTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step by cause; they add up to `total`."""

    compute: float
    """Matrix products, attention and elementwise kernels of the slowest stage."""
    recompute: float
    """Activations computed again."""
    tensor: float
    """Collectives of tp, cp and ep inside blocks."""
    data: float
    """Data-parallel communication that the backward does not hide."""
    bubble: float
    """Idle time of the pipeline."""
    send: float
    """Activations between stages."""
    optimizer: float
    offload: float
    host: float
    """Launches that the device waits for."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return float(sum(getattr(self, name) for name in PARTS))


PARTS = ("compute", "recompute", "tensor", "data", "bubble", "send", "optimizer", "offload", "host")


def step_time(
    config: ModelConfig,
    layout: Layout,
    cluster: Cluster,
    *,
    length: int,
    sequences: int,
    accumulation: int,
    optimizer: str = "adamw",
    compiled: bool = True,
    traits: Traits = PILEDRIVER,
    efficiency: Efficiency | None = None,
    stages: tuple[Stage, ...] | None = None,
    memo: dict[Any, Any] | None = None,
) -> StepTime:
    """Return the seconds of one step: `accumulation` micro-batches of `sequences` on each data-parallel rank.

    With pp, `accumulation` counts the micro-batches that flow through the pipeline in one step. `memo` keeps the
    seconds of blocks between calls for one model, cluster and efficiency.
    """
    efficiency = efficiency or Efficiency()
    setting = setting_of(layout, sequences=sequences, length=length, compiled=compiled, traits=traits)
    placed = Placed(
        config=config,
        layout=layout,
        cluster=cluster,
        setting=setting,
        efficiency=efficiency,
        optimizer=optimizer,
        memo={} if memo is None else memo,
    )
    timer = StageTimer(placed)
    kinds = [
        (count, [(stage, timer.seconds(stage, device)) for stage in mine])
        for count, device, mine in rank_kinds(config, layout, cluster, stages)
    ]
    seconds = [sum(cost.seconds for _, cost in mine) for _, mine in kinds]
    slowest = max(range(len(kinds)), key=seconds.__getitem__)
    bubble = send = 0.0
    if layout.pp > 1:
        others = sum(count * own for (count, _), own in zip(kinds, seconds, strict=True)) - seconds[slowest]
        bubble, send = _pipeline(placed, others, accumulation)
    names = ("compute", "recompute", "tensor", "host", "offload")
    parts = [accumulation * sum(getattr(cost, name) for _, cost in kinds[slowest][1]) for name in names]
    compute, recompute, tensor, host, copies = parts
    data = max(exposed_seconds(placed, mine, accumulation) for _, mine in kinds)
    stepping, offload = max((optimizer_seconds(placed, mine, accumulation) for _, mine in kinds), key=sum)
    return StepTime(
        compute=compute,
        recompute=recompute,
        tensor=tensor,
        data=data,
        bubble=bubble,
        send=send,
        optimizer=stepping,
        offload=offload + copies,
        host=host + efficiency.step,
    )


def _pipeline(placed: Placed, others: float, microbatches: int) -> tuple[float, float]:
    """Return the seconds of the bubble, and of activations between stages.

    `others` are the seconds of a micro-batch on all ranks but the slowest.
    """
    layout, setting = placed.layout, placed.setting
    per = layout.stages // layout.pp
    # The first micro-batch passes every stage; looped schedules start after one of their `per` parts.
    fill = others / (per if layout.schedule in MANY_STAGES_A_RANK else 1)
    if layout.schedule in SPLIT_BACKWARD:
        # Weight gradients fill most of the bubble.
        fill *= 1 / 3 if layout.schedule == "interleaved-zero-bubble" else 1 / 6
    if layout.schedule in TWO_STAGES_A_RANK:
        fill /= 2
    size = setting.tokens * placed.config.dim * setting.itemsize
    if setting.traits.scatter_sends:
        size /= layout.tp
    hop = placed.collective("send", "pp", size)
    # Forward and backward of each stage border; a steady pipeline hides none of a blocking exchange.
    steady = 0 if setting.traits.overlap_sends and per > 1 else microbatches * per
    return fill, 2 * hop * (steady + layout.pp - 1)
