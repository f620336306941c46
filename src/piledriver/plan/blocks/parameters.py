"""The parameter tensors of a model by part, and this rank's share of each under a layout."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from piledriver.engine.layout import TWO_STAGES_A_RANK, Layout
from piledriver.engine.pipeline_parallel.balance import balanced
from piledriver.engine.pipeline_parallel.costs import Cost, weights
from piledriver.engine.pipeline_parallel.schedules import rank_of_stage
from piledriver.engine.pipeline_parallel.split import parts_by_count
from piledriver.models import Transformer
from piledriver.models.axes import parameter_axes
from piledriver.models.config import ModelConfig
from piledriver.models.model_size import mean_context
from piledriver.plan.blocks.per_model import cached_per_model
from piledriver.plan.errors import PlanError

# The length by which the engine balances stages, at most.
_LONGEST = 4096
_SPLIT = frozenset({"heads", "kv_heads", "mlp", "vocab"})


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """One parameter: its name inside its part, shape, and the names of its axes."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str, ...]

    @property
    def is_expert(self) -> bool:
        """Whether expert parallelism shards it."""
        return self.axes[:1] == ("experts",)

    def local(self, layout: Layout) -> tuple[int, ...]:
        """Return the shape on one rank after tp and ep."""
        split = _SPLIT if layout.loss_parallel else _SPLIT - {"vocab"}
        sizes = list(self.shape)
        dims = [dim for dim, axis in enumerate(self.axes) if axis in split]
        if layout.tp > 1 and dims:
            sizes[dims[0]] = math.ceil(sizes[dims[0]] / layout.tp)
        if layout.ep > 1 and self.is_expert:
            sizes[0] = math.ceil(sizes[0] / layout.ep)
        return tuple(sizes)

    def elements(self, layout: Layout) -> int:
        """Return the elements on one rank after tp and ep, before ZeRO."""
        return math.prod(self.local(layout))

    def shard(self, layout: Layout) -> int:
        """Return the elements of one rank's ZeRO shard, the largest of them: rows are divided in even chunks."""
        local = self.local(layout)
        ranks = shard_ranks(layout, expert=self.is_expert)
        if not local:
            return 1
        return math.ceil(local[0] / ranks) * math.prod(local[1:])


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """The parameters of a model: of one block of each kind, and of the parts outside, with the number of blocks."""

    block: tuple[ParameterShape, ...]
    """Of a block; of one with experts in a model that has both kinds."""
    dense: tuple[ParameterShape, ...]
    """Of a dense block in a model whose other blocks have experts; empty if all blocks are alike."""
    embedding: tuple[ParameterShape, ...]
    """The first pipeline unit's own."""
    head: tuple[ParameterShape, ...]
    """The last pipeline unit's own: final norm and output layer; a tied output layer has none."""
    layers: int
    dense_layers: int
    tied: bool

    @property
    def count(self) -> int:
        """Number of parameters, tied ones once."""
        blocks = (self.layers - self.dense_layers) * _elements(self.block) + self.dense_layers * _elements(self.dense)
        return blocks + _elements((*self.embedding, *self.head))

    def of_kind(self, *, experts: bool) -> tuple[ParameterShape, ...]:
        """Return the parameters of a block with or without experts; of models with one kind of block, of that."""
        return self.block if experts or not self.dense_layers else self.dense


def _elements(shapes: Iterable[ParameterShape]) -> int:
    return sum(math.prod(one.shape) for one in shapes)


@functools.lru_cache(maxsize=64)
def parts_of(config: ModelConfig) -> ModelParts:
    """Return the parameters of our `Transformer` by part; one block is built, on the meta device."""
    model = _one_block(config, dense=False)
    found: dict[str, list[ParameterShape]] = {"block": [], "embedding": [], "head": []}
    for one in model:
        part = "block" if one.name.startswith("blocks.") else "embedding" if "embedding" in one.name else "head"
        found[part].append(replace(one, name=one.name.removeprefix("blocks.0.")))
    dense_layers = config.layers - config.expert_layers if config.moe is not None else 0
    dense = [one for one in _one_block(config, dense=True) if one.name.startswith("blocks.")] if dense_layers else []
    return ModelParts(
        block=tuple(found["block"]),
        dense=tuple(replace(one, name=one.name.removeprefix("blocks.0.")) for one in dense),
        embedding=tuple(found["embedding"]),
        head=tuple(found["head"]),
        layers=config.layers,
        dense_layers=dense_layers,
        tied=config.tied,
    )


def _one_block(config: ModelConfig, *, dense: bool) -> list[ParameterShape]:
    """Return the parameters of this model with one block only."""
    moe = None if config.moe is None else replace(config.moe, dense_layers=(0,) if dense else ())
    small = replace(config, layers=1, full_attention_layers=(), no_rope_layers=(), moe=moe)
    with torch.device("meta"):
        model = Transformer(small)
    axes = parameter_axes(model)
    return [ParameterShape(name, tuple(one.shape), axes[name]) for name, one in model.named_parameters()]


def shard_ranks(layout: Layout, *, expert: bool = False) -> int:
    """Return over how many ranks ZeRO shards a parameter."""
    if not layout.zero:
        return 1
    ranks = (layout.dp_shard or 1) * layout.cp
    return max(1, ranks // layout.ep) if expert else ranks


@dataclass(frozen=True, slots=True)
class Stage:
    """What one pipeline stage holds: its blocks, and whether it has the embedding or the output layer."""

    blocks: range
    first: bool
    last: bool


@cached_per_model
def block_kinds(config: ModelConfig, blocks: range) -> tuple[tuple[int | None, bool, int], ...]:
    """Return the kinds of blocks among some: (attention window, whether it has experts, how many)."""
    found = Counter((config.window_of(layer), config.has_experts(layer)) for layer in blocks)
    return tuple((window, experts, count) for (window, experts), count in found.items())


@cached_per_model
def stages_of_model(config: ModelConfig, stages: int) -> tuple[Stage, ...]:
    """Return the stages that the engine splits a model into by itself: of about equal cost."""
    if stages == 1:
        return (Stage(range(config.layers), True, True),)
    if stages > config.layers + 1:
        raise PlanError(
            f"{stages} pipeline stages of a model with {config.layers + 1} units (blocks, and the output layer)",
            fix=f"use at most {config.layers + 1} stages",
        )
    shares = weights(_unit_costs(config))
    return _stages(config, balanced(shares, stages))


def stages_of_layout(config: ModelConfig, layout: Layout) -> tuple[Stage, ...]:
    """Return the stages that the engine splits a model into on a layout."""
    if layout.stage_blocks is None:
        return stages_of_model(config, layout.stages)
    parts = parts_by_count(layout.stage_blocks, config.layers + 1, output=True)
    return _stages(config, parts)


def _stages(config: ModelConfig, parts: list[range]) -> tuple[Stage, ...]:
    return tuple(
        Stage(range(part.start, min(part.stop, config.layers)), part.start == 0, part.stop > config.layers)
        for part in parts
    )


def stages_by_rank(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each pipeline rank."""
    return _places(layout.pp, layout.stages, layout.schedule in TWO_STAGES_A_RANK)


@functools.lru_cache(maxsize=1024)
def _places(pp: int, stages: int, is_v: bool) -> tuple[tuple[int, ...], ...]:
    if pp == 1:
        return ((0,),)
    plain = Layout(pp=pp, schedule="zbv") if is_v else Layout(pp=pp)
    found: list[list[int]] = [[] for _ in range(pp)]
    for stage in range(stages):
        found[rank_of_stage(plain, stage)].append(stage)
    return tuple(map(tuple, found))


def even_stages(config: ModelConfig, stages: int) -> tuple[Stage, ...]:
    """Return stages with the same number of blocks, as other frameworks cut; the ends come on top."""
    edges = [round(config.layers * number / stages) for number in range(stages + 1)]
    return tuple(
        Stage(range(begin, end), number == 0, number == stages - 1)
        for number, (begin, end) in enumerate(itertools.pairwise(edges))
    )


def _unit_costs(config: ModelConfig) -> list[Cost]:
    parts = parts_of(config)
    length = min(config.max_positions, _LONGEST)
    units = []
    for layer in range(config.layers):
        shapes = parts.of_kind(experts=config.has_experts(layer))
        flops = 2.0 * config.heads * (config.head_dim + config.value_dim)
        flops *= mean_context(length, config.window_of(layer))
        for one in shapes:
            share = config.moe.experts_per_token / config.moe.experts if config.moe and one.is_expert else 1.0
            flops += 2.0 * share * math.prod(one.shape) * (len(one.shape) > 1)
        units.append(Cost(flops, _elements(shapes)))
    units[0] = units[0] + Cost(0.0, _elements(parts.embedding))
    output = config.vocab_size * config.dim
    return [*units, Cost(2.0 * output, output)]
