"""Seconds of one optimizer step on a layout: compute, communication that is not hidden, bubbles, optimizer, offload."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from piledriver.engine.layout import MANY_STAGES_A_RANK, SPLIT_BACKWARD, TWO_STAGES_A_RANK, Layout
from piledriver.models.config import ModelConfig
from piledriver.plan.blocks.ends import EndCost, embedding_cost, loss_cost
from piledriver.plan.blocks.operators import BlockCost, Exchange
from piledriver.plan.blocks.parameters import (
    Stage,
    block_kinds,
    parts_of,
    shard_ranks,
)
from piledriver.plan.blocks.setting import PILEDRIVER, BlockSetting, Traits, setting_of
from piledriver.plan.blocks.transformer import block_cost
from piledriver.plan.hardware.cluster import Cluster, Device
from piledriver.plan.memory.states import StateBytes, stage_states, weight_size_of
from piledriver.plan.time.links import Axis, axes_of_layout, collective_seconds
from piledriver.plan.time.optimizer import kernel_seconds
from piledriver.plan.time.rank_kinds import blocks_key, rank_kinds
from piledriver.plan.time.rates import Efficiency, Rates


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


# Traffic of stochastic rounding outside an optimizer's kernel, for each parameter: its noise is hashed in 64 bits.
_ROUNDING_BYTES = 340.0
# What `fully_shard` does on the host around each block, forward and backward, in launches of a kernel.
_SHARDED_CALLS = (25, 45)
# Share of a device's units that the kernels of a collective occupy: what runs beside them is slower by that much.
_CONTENTION = 0.12
PARTS = ("compute", "recompute", "tensor", "data", "bubble", "send", "optimizer", "offload", "host")


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockSeconds:
    forward: float
    backward: float
    recompute: float
    tensor_forward: float
    tensor_backward: float
    host: float
    """Seconds that the device waits for launches."""
    launched: float


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
    axes = axes_of_layout(layout)
    timer = _Timer(config, layout, cluster, setting, axes, efficiency, optimizer, {} if memo is None else memo)
    kinds = [
        (count, [(stage, timer.stage(stage, device)) for stage in mine])
        for count, device, mine in rank_kinds(config, layout, cluster, stages)
    ]
    seconds = [sum(cost.seconds for _, cost in mine) for _, mine in kinds]
    slowest = max(range(len(kinds)), key=seconds.__getitem__)
    bubble = send = 0.0
    if layout.pp > 1:
        others = sum(count * own for (count, _), own in zip(kinds, seconds, strict=True)) - seconds[slowest]
        bubble, send = timer.pipeline(others, accumulation)
    names = ("compute", "recompute", "tensor", "host")
    parts = [accumulation * sum(getattr(cost, name) for _, cost in kinds[slowest][1]) for name in names]
    compute, recompute, tensor, host = parts
    data = max(timer.data_parallel(mine, accumulation) for _, mine in kinds)
    optimizer_seconds, offload = max((timer.optimizer_steps(mine, accumulation) for _, mine in kinds), key=sum)
    return StepTime(
        compute=compute,
        recompute=recompute,
        tensor=tensor,
        data=data,
        bubble=bubble,
        send=send,
        optimizer=optimizer_seconds,
        offload=offload,
        host=host + efficiency.step,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StageSeconds:
    compute: float
    recompute: float
    tensor: float
    host: float
    launched: float
    """Seconds of the host for its launches, which run beside the device."""
    backward: float
    """Seconds of the backward, which hides data-parallel communication."""
    seconds: float
    """All of them."""


class _Timer:
    """Seconds of the parts of a step on one layout."""

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        cluster: Cluster,
        setting: BlockSetting,
        axes: dict[str, Axis],
        efficiency: Efficiency,
        optimizer: str,
        memo: dict[Any, Any],
    ) -> None:
        self.config, self.layout, self.cluster, self.setting = config, layout, cluster, setting
        self.axes, self.efficiency, self.optimizer = axes, efficiency, optimizer
        self.weight_size = 2 if setting.traits.master_copy else weight_size_of(layout)
        self.matrix_size = setting.itemsize if setting.half_matrices else self.weight_size
        self.memo = memo
        self.own: dict[Any, Any] = {}

    def _key(self, stage: Stage) -> Any:
        """Stages alike cost the same."""
        return blocks_key(self.config, stage), stage.first, stage.last

    def stage(self, stage: Stage, device: Device) -> _StageSeconds:
        """Return the seconds of one micro-batch on one stage."""
        key = (self._key(stage), device.name)
        if key not in self.own:
            self.own[key] = self._stage(stage, device)
        found: _StageSeconds = self.own[key]
        return found

    def _stage(self, stage: Stage, device: Device) -> _StageSeconds:
        efficiency, traits = self.efficiency, self.setting.traits
        if "fp8" in device.peaks and traits.hopper_attention != 1.0:
            efficiency = replace(efficiency, attention=efficiency.attention * traits.hopper_attention)
        rates = Rates(device, self.setting.matmul_precision, efficiency)
        compute = recompute = tensor = host = backward = launched = 0.0
        for window, experts, many in block_kinds(self.config, stage.blocks):
            key = (self.setting, self.weight_size, window, experts, device.name)
            if key not in self.memo:
                cost = block_cost(self.config, window, self.setting, experts)
                self.memo[key] = self._block(cost, rates, experts=experts)
            one: _BlockSeconds = self.memo[key]
            compute += many * (one.forward + one.backward)
            recompute += many * one.recompute
            tensor += many * (one.tensor_forward + one.tensor_backward)
            host += many * one.host
            launched += many * one.launched
            backward += many * (one.backward + one.recompute + one.tensor_backward)
        for end, there in ((self._embedding(), stage.first), (self._loss(), stage.last)):
            if there:
                place = (self.setting, self.weight_size, end is self._embedding(), device.name)
                if place not in self.memo:
                    self.memo[place] = rates.total(end.operators), self._exchanges(end.exchanges)
                seconds, exchanged = self.memo[place]
                compute += seconds
                backward += 2 / 3 * seconds
                tensor += exchanged
        return _StageSeconds(
            compute=compute,
            recompute=recompute,
            tensor=tensor,
            host=host,
            launched=launched,
            backward=backward,
            seconds=compute + recompute + tensor + host,
        )

    def _block(self, cost: BlockCost, rates: Rates, *, experts: bool) -> _BlockSeconds:
        forward, backward, again = rates.total(cost.forward), rates.total(cost.backward), rates.total(cost.recompute)
        if self.setting.casts and not self.setting.traits.master_copy:
            # fp32 weights are cast in the forward and again in the backward.
            elements = max(0.0, self._block_elements(experts=experts) - cost.fp8_parameters)
            forward += rates.move(6 * elements)
            backward += rates.move(6 * elements)
        hidden = 1.0 - self.setting.traits.overlap_tp
        there, back = self._exchanges(cost.forward_exchanges), self._exchanges(cost.backward_exchanges)
        launched = self._launch(rates.device)
        first, second = cost.kernels
        if self.setting.gathered and self.setting.traits.name == "piledriver":
            first, second = first + _SHARDED_CALLS[0], second + _SHARDED_CALLS[1]
        if cost.recompute and self.setting.activations == "full":
            second += first
        host = max(0.0, first * launched - forward - there) + max(0.0, second * launched - backward - again - back)
        return _BlockSeconds(
            forward=forward,
            backward=backward,
            recompute=again,
            tensor_forward=hidden * there,
            tensor_backward=hidden * back,
            host=host,
            launched=(first + second) * launched,
        )

    def _launch(self, device: Device) -> float:
        measured = device.measured.get("launch")
        return measured if isinstance(measured, float) else self.efficiency.launch

    def _block_elements(self, *, experts: bool) -> float:
        shapes = parts_of(self.config).of_kind(experts=experts)
        return float(sum(one.elements(self.layout) for one in shapes if len(one.shape) > 1))

    def _exchanges(self, exchanges: tuple[Exchange, ...]) -> float:
        return sum(
            one.count * collective_seconds(one.kind, one.bytes, self.axes[one.axis], self.cluster, self.efficiency)
            for one in exchanges
        )

    def _embedding(self) -> EndCost:
        return embedding_cost(self.config, self.setting, self.matrix_size)

    def _loss(self) -> EndCost:
        return loss_cost(self.config, self.setting, self.matrix_size)

    def pipeline(self, others: float, microbatches: int) -> tuple[float, float]:
        """Return the seconds of the bubble, and of activations between stages.

        `others` are the seconds of a micro-batch on all ranks but the slowest.
        """
        layout = self.layout
        per = layout.stages // layout.pp
        # The first micro-batch passes every stage; looped schedules start after one of their `per` parts.
        fill = others / (per if layout.schedule in MANY_STAGES_A_RANK else 1)
        if layout.schedule in SPLIT_BACKWARD:
            # Weight gradients fill most of the bubble.
            fill *= 1 / 3 if layout.schedule == "interleaved-zero-bubble" else 1 / 6
        if layout.schedule in TWO_STAGES_A_RANK:
            fill /= 2
        size = self.setting.tokens * self.config.dim * self.setting.itemsize
        if self.setting.traits.scatter_sends:
            size /= layout.tp
        hop = collective_seconds("send", size, self.axes["pp"], self.cluster, self.efficiency)
        # Forward and backward of each stage border; a steady pipeline hides none of a blocking exchange.
        steady = 0 if self.setting.traits.overlap_sends and per > 1 else microbatches * per
        return fill, 2 * hop * (steady + layout.pp - 1)

    def data_parallel(self, mine: list[tuple[Stage, _StageSeconds]], rounds: int) -> float:
        """Return the seconds of a rank's data-parallel communication that are not hidden."""
        layout, traits = self.layout, self.setting.traits
        states = [stage_states(self.config, stage, layout, self.optimizer) for stage, _ in mine]
        block = max(one["block"].elements for one in states)
        ends = [one["embedding"].elements + one["head"].elements for one in states]
        total = sum(one["block"].elements * len(stage.blocks) for one, (stage, _) in zip(states, mine, strict=True))
        total += sum(ends)
        gradient_size = 4.0 if traits.fp32_gradients or not traits.master_copy else 2.0
        if layout.has_bf16_weights and layout.zero < 3:
            gradient_size = 4.0  # reduced in fp32
        hybrid = self._time("all-reduce", "dp_replicate", total * gradient_size / shard_ranks(layout))
        if layout.zero == 3 and self.axes["dp_shard"].size > 1:
            sharded = sum(
                self._fully_sharded(one["block"].elements, end, stage, cost, rounds)
                for one, end, (stage, cost) in zip(states, ends, mine, strict=True)
            )
            return hybrid * (1 - traits.overlap) + sharded
        # Of several stages on a rank all but the last to finish reduce beside the last micro-batches of the others.
        times = max(1.0, layout.pp * (len(mine) - 1) / len(mine)) if layout.schedule in MANY_STAGES_A_RANK else 1.0
        backward = times * sum(cost.backward for _, cost in mine)
        last = block / max(total, 1.0)
        if layout.zero in (1, 2):
            kind = "reduce-scatter" if layout.zero == 2 or traits.master_copy else "all-reduce"
            reduce = self._time(kind, "dp_shard", total * gradient_size) + hybrid
            gather = self._time("all-gather", "dp_shard", total * self.weight_size)
            forward = times * sum(cost.seconds - cost.backward for _, cost in mine)
            hidden = min(gather, forward) * (traits.overlap if traits.master_copy else 0.0)
            return self._exposed(reduce, backward, last) + gather - (1 - _CONTENTION) * hidden
        return self._exposed(hybrid, backward, last)

    def _exposed(self, seconds: float, backward: float, last: float) -> float:
        """Return what the backward does not hide: all beyond its length, and the last bucket."""
        overlap = self.setting.traits.overlap
        hidden = overlap * min(seconds * (1 - last), 0.9 * backward)
        return seconds - (1 - _CONTENTION) * hidden

    def _fully_sharded(self, block: float, ends: float, stage: Stage, cost: _StageSeconds, rounds: int) -> float:
        """Zero 3: gather each block before its forward and its backward, reduce its gradients after."""
        layers = max(1, len(stage.blocks))
        size = self.setting.itemsize
        gather = self._time("all-gather", "dp_shard", block * size)
        reduce = self._time("reduce-scatter", "dp_shard", block * 4)
        ends_gather = self._time("all-gather", "dp_shard", ends * size)
        ends_reduce = self._time("reduce-scatter", "dp_shard", ends * 4)
        backward = cost.backward / layers
        forward = (cost.seconds - cost.backward) / layers
        overlap = self.setting.traits.overlap
        there = _beside(gather, overlap * forward)
        # Gradients are reduced in the last micro-batch only.
        back = _beside(gather, overlap * backward)
        last = _beside(gather + reduce, overlap * backward)
        if self.layout.pp > 1:
            # Backwards leave their blocks gathered until the last one: each micro-batch gathers once.
            return rounds * layers * there + gather + layers * last + ends_gather + ends_reduce
        rounded = rounds * (layers * there + gather) + (rounds - 1) * layers * back + layers * last
        return rounded + rounds * ends_gather + ends_reduce

    def _time(self, kind: str, axis: str, size: float) -> float:
        return collective_seconds(kind, size, self.axes[axis], self.cluster, self.efficiency)

    def optimizer_steps(self, mine: list[tuple[Stage, _StageSeconds]], rounds: int) -> tuple[float, float]:
        """Return the seconds of a rank's optimizer and of offload.

        The host is ahead of the device by what the blocks took longer on the device than to launch.
        """
        parts = [self._known_optimizer_step(stage) for stage, _ in mine]
        ahead = sum(max(0.0, cost.seconds - cost.host - cost.launched) for _, cost in mine)
        device, host = sum(part[0] for part in parts), sum(part[1] for part in parts)
        return max(device, host - rounds * ahead), sum(part[2] for part in parts)

    def _known_optimizer_step(self, stage: Stage) -> tuple[float, float, float]:
        """Return the seconds of `_optimizer_step`, computed once for layouts alike: micro-batches do not matter."""
        layout, setting = self.layout, self.setting
        key = (
            *(self._key(stage), layout.zero, layout.tp, layout.cp, layout.ep, layout.dp_shard, layout.dp_replicate),
            *(layout.precision, layout.offload, layout.loss_parallel, self.optimizer, setting.traits, "optimizer"),
        )
        found: tuple[float, float, float] | None = self.memo.get(key)
        if found is None:
            found = self.memo[key] = self._optimizer_step(stage)
        return found

    def _optimizer_step(self, stage: Stage) -> tuple[float, float, float]:
        """Return the seconds of a stage's optimizer on the device, of the host for it, and of offload."""
        states = stage_states(self.config, stage, self.layout, self.optimizer, self.setting.traits)
        total = states["block"].times(len(stage.blocks)) + states["embedding"] + states["head"]
        rates = Rates(self.cluster.slowest, self.setting.matmul_precision, self.efficiency)
        if self.layout.offloads:
            return 0.0, 0.0, self._offloaded_step(total)
        # Read gradient, weight and states, write weight and states; the norm reads the gradients once more.
        share = total.owned / max(total.elements, 1.0) if self.layout.zero else 1.0
        traffic = 2 * total.states + 2 * total.weights * min(1.0, share if self.layout.zero < 3 else 1.0)
        traffic += 3 * total.gradients
        if self.layout.has_bf16_weights and self.optimizer in ("adamw", "muon", "lion", "sgd"):
            traffic += _ROUNDING_BYTES * total.owned
        launch = self._launch(rates.device)
        iterations, host = kernel_seconds(self.config, stage, self.optimizer, rates, launch)
        return rates.move(traffic) + iterations, host, 0.0

    def _offloaded_step(self, total: StateBytes) -> float:
        """Seconds of transfers and of the step on the host; reads and writes of files overlap with it."""
        host, tiers = self.cluster.host, self.layout.tiers
        size = 2 if self.setting.half_matrices else 4
        moves = 2 * total.owned * size / host.link
        if self.layout.streams_parameters:
            moves += 2 * total.elements * size / (host.link if tiers.parameters == "host" else host.disk)
        share = tiers.optimizer_share if tiers.optimizer == "disk" else 0.0
        files = 2 * share * total.disk / host.disk
        step = total.owned / host.adam
        return moves + (max(step, files) if tiers.buffers > 1 else step + files)


def _beside(seconds: float, compute: float) -> float:
    """Return what communication beside this much compute adds to a step."""
    hidden = min(seconds, compute)
    return seconds - (1 - _CONTENTION) * hidden


def stage_seconds(
    config: ModelConfig,
    layout: Layout,
    cluster: Cluster,
    device: Device,
    stages: list[Stage],
    *,
    length: int,
    sequences: int,
    compiled: bool = True,
    optimizer: str = "adamw",
    efficiency: Efficiency | None = None,
) -> list[float]:
    """Return the seconds of one micro-batch on each of these stages, on one device."""
    setting = setting_of(layout, sequences=sequences, length=length, compiled=compiled)
    timer = _Timer(config, layout, cluster, setting, axes_of_layout(layout), efficiency or Efficiency(), optimizer, {})
    return [timer.stage(stage, device).seconds for stage in stages]
