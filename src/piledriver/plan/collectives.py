"""The collectives of one optimizer step on one rank: kind, group, bytes and count of each.

Forward and backward of every micro-batch, the reduction of gradients, and the optimizer's gather of updated rows; not
what a training loop adds (the norm of gradients, means of logged values). Bytes are those of the larger side of a call
on this rank, as `observe.communication` counts them; of an all-to-all, what the rank sends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from piledriver.engine.layout import Layout
from piledriver.engine.pipeline_parallel.schedules import rank_of_stage, stages_of_rank
from piledriver.engine.shards.owned_rows import BUCKET_BYTES
from piledriver.models.config import ModelConfig
from piledriver.plan.blocks.ends import embedding_cost, loss_cost
from piledriver.plan.blocks.operators import Exchange
from piledriver.plan.blocks.parameters import ParameterShape, Stage, parts_of, stages_of_layout
from piledriver.plan.blocks.setting import BlockSetting, setting_of
from piledriver.plan.blocks.transformer import block_cost
from piledriver.plan.memory.state_bytes import weight_size_of
from piledriver.plan.time.links import axes_of_layout


def step_collectives(
    config: ModelConfig,
    layout: Layout,
    *,
    length: int,
    sequences: int,
    accumulation: int = 1,
    pipeline_rank: int = 0,
    kind: str = "cuda",
    compiled: bool = False,
) -> tuple[Exchange, ...]:
    """Return the collectives of one step of a resolved layout, on a rank of stage group `pipeline_rank`.

    >>> layout = Layout(tp=2).on(2)
    >>> config = ModelConfig(vocab_size=64, dim=16, layers=1, heads=2)
    >>> {one.axis for one in step_collectives(config, layout, length=8, sequences=1)}
    {'tp'}
    """
    made = _Rank(config, layout, length, sequences, kind, compiled, pipeline_rank)
    found: Counter[tuple[str, str, float]] = Counter()
    for one in made.micro_batch():
        found[one.kind, one.axis, one.bytes] += accumulation * one.count
    for one in (*made.gathers(accumulation), *made.reductions(), *made.updates(), *made.batch()):
        found[one.kind, one.axis, one.bytes] += one.count
    sizes = made.axes
    return tuple(
        Exchange(kind, axis, size, count)  # type: ignore[arg-type]
        for (kind, axis, size), count in sorted(found.items())
        if sizes[axis].size > 1 and size
    )


class _Rank:
    """One rank of a layout: its stages, and the parameters that it holds."""

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        length: int,
        sequences: int,
        kind: str,
        compiled: bool,
        pipeline_rank: int,
    ) -> None:
        self.config, self.layout, self.kind = config, layout, kind
        self.setting: BlockSetting = setting_of(layout, sequences=sequences, length=length, compiled=compiled)
        self.axes, self.weight_size = axes_of_layout(layout), weight_size_of(layout)
        every = stages_of_layout(config, layout)
        self.numbers = stages_of_rank(layout, pipeline_rank) if layout.pp > 1 else [0]
        self.stages: list[Stage] = [every[number] for number in self.numbers]
        self.parts = parts_of(config)
        self.fully_sharded = layout.zero == 3 and self.axes["dp_shard"].size * self.axes["dp_replicate"].size > 1

    @property
    def data_axes(self) -> list[str]:
        """The axes over which gradients are averaged, dp_shard first."""
        return [name for name in ("dp_shard", "dp_replicate") if self.axes[name].size > 1]

    def micro_batch(self) -> Iterator[Exchange]:
        """Yield the collectives of one micro-batch: inside blocks, at the ends, between stages."""
        for number, stage in zip(self.numbers, self.stages, strict=True):
            for layer in stage.blocks:
                experts = self.config.has_experts(layer)
                cost = block_cost(self.config, self.config.window_of(layer), self.setting, experts)
                yield from (*cost.forward_exchanges, *cost.backward_exchanges)
                if experts:
                    yield from self._balance()
            if stage.first:
                yield from embedding_cost(self.config, self.setting, self.weight_size).exchanges
            if stage.last:
                yield from loss_cost(self.config, self.setting, self.weight_size, self.kind).exchanges
            yield from self._borders(number, stage)

    def _balance(self) -> Iterator[Exchange]:
        """The balance loss averages the experts' shares and probabilities over the data, and one gradient."""
        assert self.config.moe is not None
        for axis in self.data_axes:
            yield Exchange("all-reduce", axis, self.config.moe.experts * 4, 3)

    def _borders(self, number: int, stage: Stage) -> Iterator[Exchange]:
        """Activations to the next stage and gradients to the one before; between stages they are whole over tp."""
        layout, setting = self.layout, self.setting
        size = setting.tokens * self.config.dim * setting.itemsize
        neighbours = [(number - 1, not stage.first), (number + 1, not stage.last)]
        for other, there in neighbours:
            if not there:
                continue
            if setting.sequence_parallel:
                yield Exchange("all-gather", "tp", size)
            if rank_of_stage(layout, other) != rank_of_stage(layout, number):
                yield Exchange("send", "pp", size)
                if self.config.moe is not None:
                    yield Exchange("send", "pp", 4)  # the running sum of the balance loss

    def batch(self) -> Iterator[Exchange]:
        """Yield what a pipeline exchanges once in a batch: counts of targets, sums of the loss, tied weights."""
        if self.layout.pp == 1:
            return
        for axis in self.data_axes:
            yield Exchange("all-reduce", axis, 8)
        for axis in ("pp", *self.data_axes):
            yield Exchange("all-reduce", axis, 40)
        first, last = rank_of_stage(self.layout, 0), rank_of_stage(self.layout, self.layout.stages - 1)
        if self.parts.tied and first != last and any(stage.first or stage.last for stage in self.stages):
            table = next(one for one in self.parts.embedding if one.axes[0] == "vocab")
            elements = table.shard(self.layout) if self.fully_sharded else table.elements(self.layout)
            yield Exchange("send", "pp", elements * self.weight_size)

    def gathers(self, accumulation: int) -> Iterator[Exchange]:
        """Zero 3: yield the all-gathers, of each block in the forward and in the backward, of the rest once.

        A pipeline reshards after forwards and after its last backward: a block is gathered for the forwards that fill
        the pipeline, then before each backward that follows a forward; the rest once.
        """
        if not self.fully_sharded:
            return
        size, ranks = self.setting.itemsize, self.axes["dp_shard"].size
        for stage in self.stages:
            for unit, axis_ranks, is_block in self._units(stage):
                times = 2 * accumulation if is_block else accumulation
                if self.layout.pp > 1:
                    times = accumulation + 1 if is_block else 1
                scale = axis_ranks * size if not self.layout.has_bf16_weights else axis_ranks * self.weight_size
                axis = "dp_shard" if axis_ranks == ranks else "expert_dp"
                size_of_unit = scale * _chunks(unit, self.layout, axis_ranks)
                yield from self._on(axis, "all-gather", size_of_unit, times)

    def reductions(self) -> Iterator[Exchange]:
        """Yield the reductions of gradients."""
        if self.fully_sharded:
            size = 4 if self.setting.precision != "fp32" else self.weight_size
            for stage in self.stages:
                for unit, ranks, _ in self._units(stage):
                    chunk = size * _chunks(unit, self.layout, ranks)
                    axis = "dp_shard" if ranks == self.axes["dp_shard"].size else "expert_dp"
                    yield from self._on(axis, "reduce-scatter", ranks * chunk)
                    yield from self._on("dp_replicate", "all-reduce", chunk)
            return
        for bucket in _buckets([*self._own()][::-1], self.layout, self.weight_size):
            yield from self._reduced(bucket)

    def _reduced(self, bucket: list[ParameterShape]) -> Iterator[Exchange]:
        """One bucket: its gradients and a flag for each, in fp32."""
        if bucket[0].is_expert and self.layout.ep > 1:
            yield from self._on("expert_dp", "all-reduce", 4.0 * (len(bucket) + _sum(bucket, self.layout)))
            return
        axes = self.data_axes
        if not axes:
            return
        shard = self.axes["dp_shard"].size
        if self.layout.zero == 2 and shard > 1:
            chunk = 4.0 * (len(bucket) + _chunks(bucket, self.layout, shard))
            yield Exchange("reduce-scatter", "dp_shard", shard * chunk)
            yield from self._on("dp_replicate", "all-reduce", chunk)
            return
        whole = 4.0 * (len(bucket) + _sum(bucket, self.layout))
        for axis in axes:
            yield Exchange("all-reduce", axis, whole)

    def updates(self) -> Iterator[Exchange]:
        """Zero 1 and 2: yield the all-gathers of updated rows."""
        ranks = self.axes["dp_shard"].size
        if self.layout.zero not in (1, 2) or ranks == 1:
            return
        for bucket in _filled([*self._own()], self.layout, self.weight_size):
            yield Exchange("all-gather", "dp_shard", self.weight_size * ranks * _chunks(bucket, self.layout, ranks))

    def _on(self, axis: str, kind: str, size: float, count: int = 1) -> Iterator[Exchange]:
        """Yield a collective of an axis, unless that has one rank."""
        if self.axes[axis].size > 1:
            yield Exchange(kind, axis, size, count)  # type: ignore[arg-type]

    def _own(self) -> Iterator[ParameterShape]:
        """Yield the parameters of this rank's stages, in the model's order."""
        for stage in self.stages:
            if stage.first:
                yield from self.parts.embedding
            for layer in stage.blocks:
                yield from self._block(layer)
            if stage.last:
                yield from self.parts.head

    def _block(self, layer: int) -> tuple[ParameterShape, ...]:
        return self.parts.of_kind(experts=self.config.has_experts(layer))

    def _units(self, stage: Stage) -> Iterator[tuple[list[ParameterShape], int, bool]]:
        """Yield what `fully_shard` gathers together: (parameters, ranks, whether they are a block's)."""
        ranks = self.axes["dp_shard"].size
        for layer in stage.blocks:
            shapes = self._block(layer)
            if self.layout.ep > 1:
                yield [one for one in shapes if one.is_expert], max(1, ranks // self.layout.ep), True
                shapes = tuple(one for one in shapes if not one.is_expert)
            yield list(shapes), ranks, True
        ends = [*(self.parts.embedding if stage.first else ()), *(self.parts.head if stage.last else ())]
        if self.parts.tied and stage.last and not stage.first:
            ends.append(next(one for one in self.parts.embedding if one.axes[0] == "vocab"))
        if ends:
            yield ends, ranks, False


def _chunks(shapes: Iterable[ParameterShape], layout: Layout, ranks: int) -> float:
    """Elements of one rank's rows of each parameter, padding included."""
    found = 0
    for one in shapes:
        local = one.local(layout)
        found += math.ceil(local[0] / ranks) * math.prod(local[1:]) if local else 1
    return float(found)


def _sum(shapes: Iterable[ParameterShape], layout: Layout) -> float:
    return float(sum(one.elements(layout) for one in shapes))


def _buckets(shapes: list[ParameterShape], layout: Layout, size: int) -> list[list[ParameterShape]]:
    """Group consecutive parameters as `GradientReducer` does: up to a size, experts apart."""
    filling: dict[tuple[bool, bool], list[ParameterShape]] = {}
    full: list[list[ParameterShape]] = []
    for one in shapes:
        members = filling.setdefault((one.is_expert and layout.ep > 1, not one.shape), [])
        members.append(one)
        if size * _sum(members, layout) >= BUCKET_BYTES:
            full.append(filling.pop((one.is_expert and layout.ep > 1, not one.shape)))
    return full + list(filling.values())


def _filled(shapes: list[ParameterShape], layout: Layout, size: int) -> list[list[ParameterShape]]:
    """Group parameters as the gather of updated rows does: a bucket stays below the size, unless one is larger."""
    found: list[list[ParameterShape]] = [[]]
    used = 0.0
    for one in shapes:
        if not one.shape:
            continue
        if found[-1] and used + size * one.elements(layout) > BUCKET_BYTES:
            found.append([])
            used = 0.0
        found[-1].append(one)
        used += size * one.elements(layout)
    return [bucket for bucket in found if bucket]
