"""Seconds of one micro-batch on one pipeline stage: compute, recomputation, collectives, waiting for the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from piledriver.engine.layout import Layout
from piledriver.models.config import ModelConfig
from piledriver.plan.blocks.ends import EndCost, embedding_cost, loss_cost
from piledriver.plan.blocks.operators import BlockCost, Exchange
from piledriver.plan.blocks.parameters import Stage, block_kinds, parts_of
from piledriver.plan.blocks.setting import setting_of
from piledriver.plan.blocks.transformer import block_cost
from piledriver.plan.hardware.cluster import Cluster, Device
from piledriver.plan.time.placed import Placed
from piledriver.plan.time.rates import Efficiency, Rates

# What `fully_shard` does on the host around each block, forward and backward, in launches of a kernel.
_SHARDED_CALLS = (25, 45)
# The host's work for the ends of a model, forward and backward, in launches.
_EMBEDDING_CALLS, _LOSS_CALLS = 60, 260


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockSeconds:
    forward: float
    backward: float
    recompute: float
    tensor_forward: float
    tensor_backward: float
    launched_forward: float
    """Seconds of the host for the launches of the forward."""
    launched_backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of one micro-batch on one stage."""

    compute: float
    recompute: float
    tensor: float
    host: float
    """Seconds that the device waits for launches."""
    launched: float
    """Seconds of the host for its launches, which run beside the device."""
    backward: float
    """Seconds of the backward, which hides data-parallel communication."""
    seconds: float
    """All of them."""
    offload: float = 0.0
    """Seconds of copies of activations to the host and back that compute does not hide."""


def _with_host(parts: list[tuple[float, float]]) -> float:
    """Return the seconds of parts that the host launches and the device runs, one after the other.

    The device is done with a part when it has run it after the one before, and not before its last launch: where it is
    behind, the host runs ahead, and later parts whose launches take longer wait less.

    >>> _with_host([(2.0, 1.0), (1.0, 4.0), (5.0, 2.0)])
    8.0
    """
    host = device = 0.0
    for launched, busy in parts:
        host += launched
        device = max(device + busy, host)
    return device


class StageTimer:
    """Seconds of the stages of one placed model."""

    def __init__(self, placed: Placed) -> None:
        self.placed, self.setting = placed, placed.setting
        self.own: dict[Any, Any] = {}

    def seconds(self, stage: Stage, device: Device) -> StageSeconds:
        """Return the seconds of one micro-batch on one stage."""
        key = (self.placed.key(stage), device.name)
        if key not in self.own:
            self.own[key] = self._stage(stage, device)
        found: StageSeconds = self.own[key]
        return found

    def _stage(self, stage: Stage, device: Device) -> StageSeconds:
        placed, traits, memo = self.placed, self.setting.traits, self.placed.memo
        efficiency = placed.efficiency
        if "fp8" in device.peaks and traits.hopper_attention != 1.0:
            efficiency = replace(efficiency, attention=efficiency.attention * traits.hopper_attention)
        rates = Rates(device, self.setting.matmul_precision, efficiency)
        compute = recompute = tensor = backward = copied = 0.0
        there: list[tuple[float, float]] = []
        back: list[tuple[float, float]] = []
        for window, experts, many in block_kinds(placed.config, stage.blocks):
            key = (self.setting, placed.weight_size, window, experts, device.name, placed.layout.activation_every)
            if key not in memo:
                cost = block_cost(placed.config, window, self.setting, experts)
                memo[key] = self._block(cost, rates, experts=experts)
            one: _BlockSeconds = memo[key]
            compute += many * (one.forward + one.backward)
            recompute += many * one.recompute
            tensor += many * (one.tensor_forward + one.tensor_backward)
            returning = one.backward + one.recompute + one.tensor_backward
            there.append((many * one.launched_forward, many * (one.forward + one.tensor_forward)))
            back.append((many * one.launched_backward, many * returning))
            backward += many * returning
            if placed.layout.activation_offload:
                copied += many * block_cost(placed.config, window, self.setting, experts).kept_bytes
        launch = placed.launch(rates.device)
        for end, is_there, host in (
            (self._embedding(), stage.first, _EMBEDDING_CALLS),
            (self._loss(), stage.last, _LOSS_CALLS),
        ):
            if is_there:
                is_embedding = end is self._embedding()
                place = (self.setting, placed.weight_size, is_embedding, device.name)
                if place not in memo:
                    memo[place] = rates.total(end.operators), self._exchanges(end.exchanges)
                computed, exchanged = memo[place]
                compute += computed
                backward += 2 / 3 * computed
                tensor += exchanged
                launched = launch * host if traits.name == "piledriver" else 0.0
                there.insert(0 if is_embedding else len(there), (launched, computed + exchanged))
        parts = [*there, *reversed(back)]
        seconds, launched = _with_host(parts), sum(host for host, _ in parts)
        # The last block keeps its activations. Both directions share one stream.
        copied *= 2 * (1 - 1 / max(1, len(stage.blocks))) / placed.cluster.host.link
        return StageSeconds(
            compute=compute,
            recompute=recompute,
            tensor=tensor,
            host=seconds - compute - recompute - tensor,
            launched=launched,
            backward=backward,
            seconds=seconds,
            offload=max(0.0, copied - seconds),
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
        launched = self.placed.launch(rates.device)
        first, second = cost.kernels
        if self.setting.gathered and self.setting.traits.name == "piledriver":
            first, second = first + _SHARDED_CALLS[0], second + _SHARDED_CALLS[1]
        # Every n-th block is recomputed.
        share = 1 / self.placed.layout.activation_every if self.setting.activations in ("full", "selective") else 1.0
        again *= share
        return _BlockSeconds(
            forward=forward,
            backward=backward,
            recompute=again,
            tensor_forward=hidden * there,
            tensor_backward=hidden * back,
            launched_forward=first * launched,
            launched_backward=second * launched,
        )

    def _block_elements(self, *, experts: bool) -> float:
        shapes = parts_of(self.placed.config).of_kind(experts=experts)
        return float(sum(one.elements(self.placed.layout) for one in shapes if len(one.shape) > 1))

    def _exchanges(self, exchanges: tuple[Exchange, ...]) -> float:
        return sum(one.count * self.placed.collective(one.kind, one.axis, one.bytes) for one in exchanges)

    def _embedding(self) -> EndCost:
        return embedding_cost(self.placed.config, self.setting, self.placed.matrix_size)

    def _loss(self) -> EndCost:
        return loss_cost(self.placed.config, self.setting, self.placed.matrix_size)


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
    placed = Placed(
        config=config,
        layout=layout,
        cluster=cluster,
        setting=setting_of(layout, sequences=sequences, length=length, compiled=compiled),
        efficiency=efficiency or Efficiency(),
        optimizer=optimizer,
        memo={},
    )
    timer = StageTimer(placed)
    return [timer.seconds(stage, device).seconds for stage in stages]
