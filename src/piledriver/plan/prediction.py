"""`Prediction`: one layout of one model on one cluster, with its memory and its time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from piledriver.engine.layout import SPLIT_BACKWARD, Layout
from piledriver.models.config import ModelConfig
from piledriver.models.model_size import flops_per_token
from piledriver.plan.blocks.operators import Exchange
from piledriver.plan.blocks.parameters import Stage
from piledriver.plan.collectives import step_collectives
from piledriver.plan.hardware.cluster import HEADROOM, Cluster
from piledriver.plan.memory.phases import Timeline
from piledriver.plan.memory.timeline import step_timelines
from piledriver.plan.time.rates import Efficiency, best_measured
from piledriver.plan.time.step import StepTime, step_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained: a model, sequences of a length, a global batch, an optimizer."""

    config: ModelConfig
    length: int
    batch: int
    """Sequences of one optimizer step, over all ranks."""
    optimizer: str = "adamw"

    @property
    def tokens(self) -> int:
        """Tokens of one optimizer step."""
        return self.batch * self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A layout with its predicted memory and time."""

    workload: Workload
    layout: Layout
    """With every size resolved."""
    cluster: Cluster
    sequences: int
    """Sequences of one micro-batch on one rank."""
    accumulation: int
    """Micro-batches of one step on one rank; with pp they flow through the pipeline together."""
    compiled: bool
    timelines: tuple[Timeline, ...]
    time: StepTime

    @property
    def worst(self) -> Timeline:
        """The timeline of the rank that needs the most memory."""
        return max(self.timelines, key=lambda one: one.allocated)

    @property
    def fits(self) -> bool:
        """Whether every rank fits its device and its host, with headroom."""
        return self.missing <= 0 and self.worst.host <= self.cluster.host.memory

    @property
    def missing(self) -> float:
        """Bytes that the device lacks; negative if it fits."""
        return max(self._lacks(one) for one in self.timelines)

    @property
    def tightest(self) -> Timeline:
        """The timeline of the rank that has the least memory left."""
        return max(self.timelines, key=self._lacks)

    @property
    def capacity(self) -> float:
        """Bytes of the device that needs the most memory."""
        return self.cluster.stage_memory(self.layout.pp, self.worst.pipeline_rank)

    def _lacks(self, one: Timeline) -> float:
        room = self.cluster.stage_memory(self.layout.pp, one.pipeline_rank) * (1 - HEADROOM)
        # The memory of a CPU is that of its host.
        return one.driver - room + (one.host if self.cluster.device.kind == "cpu" else 0.0)

    def collectives(self, pipeline_rank: int = 0) -> tuple[Exchange, ...]:
        """Return the collectives of one step on a rank: kind, axis, bytes and count."""
        return step_collectives(
            self.workload.config,
            self.layout,
            length=self.workload.length,
            sequences=self.sequences,
            accumulation=self.accumulation,
            pipeline_rank=pipeline_rank,
            kind=self.cluster.device.kind,
            compiled=self.compiled,
        )

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all devices in a second."""
        return self.workload.tokens / self.time.total

    @property
    def mfu(self) -> float:
        """Model FLOPs over the bf16 peak of all devices, or over the best measured rate where that is higher."""
        per_token = flops_per_token(self.workload.config, self.workload.length)
        precision = "fp32" if self.layout.precision == "fp32" or self.cluster.device.kind == "cpu" else "bf16"
        peak = sum(
            count * max(device.peak(precision), best_measured(device, precision))
            for count, device in self.cluster.groups
        )
        return per_token * self.tokens_per_second / peak

    @property
    def joules_per_token(self) -> float:
        """Energy of the devices for one token, at 85% of their board power."""
        watts = 0.85 * sum(count * device.watts for count, device in self.cluster.groups)
        return watts / self.tokens_per_second

    def dollars(self, tokens: float) -> float:
        """Return the price of the devices for a budget of tokens."""
        hourly = sum(count * device.dollars for count, device in self.cluster.groups)
        return hourly * tokens / self.tokens_per_second / 3600

    @property
    def micro_batch_tokens(self) -> int:
        """The `micro_batch_tokens` of a training config that gives this micro-batch."""
        calls = self.accumulation if self.layout.pp > 1 else 1
        return calls * self.sequences * self.workload.length


def compiles(layout: Layout, kind: str) -> bool:
    """Return whether the engine compiles this layout on a kind of device."""
    if layout.compile is not None:
        return bool(layout.compile)
    if layout.pp > 1 and layout.schedule in SPLIT_BACKWARD:
        return False
    return kind == "cuda"


def predict(
    workload: Workload,
    layout: Layout,
    cluster: Cluster,
    *,
    sequences: int,
    efficiency: Efficiency | None = None,
    stages: tuple[Stage, ...] | None = None,
) -> Prediction:
    """Return the memory and time of one layout with micro-batches of `sequences` sequences."""
    memory = predict_memory(workload, layout, cluster, sequences=sequences, stages=stages)
    return with_time(memory, efficiency=efficiency, stages=stages)


def predict_memory(
    workload: Workload,
    layout: Layout,
    cluster: Cluster,
    *,
    sequences: int,
    stages: tuple[Stage, ...] | None = None,
    largest_only: bool = False,
) -> Prediction:
    """Return a prediction without its time; with `largest_only`, of the pipeline ranks that may need the most."""
    if layout.dp_replicate is None or layout.dp_shard is None:
        layout = layout.on(cluster.count)
    layout = layout.for_device(cluster.device.kind)
    compiled = compiles(layout, cluster.device.kind)
    accumulation = max(1, round(workload.batch / layout.data_size / sequences))
    timelines = step_timelines(
        workload.config,
        layout,
        length=workload.length,
        sequences=sequences,
        accumulation=accumulation,
        compiled=compiled,
        optimizer=workload.optimizer,
        kind=cluster.device.kind,
        stages=stages,
        every_rank=bool(cluster.others),
        largest_only=largest_only,
    )
    return Prediction(
        workload=workload,
        layout=layout,
        cluster=cluster,
        sequences=sequences,
        accumulation=accumulation,
        compiled=compiled,
        timelines=tuple(timelines),
        time=NO_TIME,
    )


def with_time(
    memory: Prediction,
    *,
    efficiency: Efficiency | None = None,
    stages: tuple[Stage, ...] | None = None,
    memo: dict[Any, Any] | None = None,
) -> Prediction:
    """Return a prediction with its time."""
    workload = memory.workload
    time = step_time(
        workload.config,
        memory.layout,
        memory.cluster,
        length=workload.length,
        sequences=memory.sequences,
        accumulation=memory.accumulation,
        compiled=memory.compiled,
        optimizer=workload.optimizer,
        efficiency=efficiency,
        stages=stages,
        memo=memo,
    )
    return replace(memory, time=time)


NO_TIME = StepTime(
    compute=0.0, recompute=0.0, tensor=0.0, data=0.0, bubble=0.0, send=0.0, optimizer=0.0, offload=0.0, host=0.0
)
"""The time of a layout that does not fit."""
