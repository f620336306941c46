"""The memory of one step as a timeline: phases, each with the bytes of every category, on one kind of rank.

The phases follow the engine: weights and states at rest, kept activations growing through the forward, the loss, the
backward from the last block to the first while gradients replace activations, the optimizer step.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from piledriver.engine.layout import Layout
from piledriver.engine.shards.owned_rows import BUCKET_BYTES
from piledriver.models.config import ModelConfig
from piledriver.plan.blocks.ends import EndCost, embedding_cost, loss_cost
from piledriver.plan.blocks.operators import BlockCost
from piledriver.plan.blocks.parameters import Stage, block_kinds, shard_ranks, stages_by_rank, stages_of_layout
from piledriver.plan.blocks.setting import PILEDRIVER, Traits, setting_of
from piledriver.plan.blocks.transformer import block_cost
from piledriver.plan.memory.optimizer_workspace import optimizer_workspace, step_tensors
from piledriver.plan.memory.phases import Owner, Phase, Timeline, make_phase
from piledriver.plan.memory.segments import stranded_bytes
from piledriver.plan.memory.state_bytes import StateBytes, weight_size_of
from piledriver.plan.memory.states import stage_states

_GIB = 2**30
# cuBLAS workspaces, which torch allocates.
_LIBRARY_BYTES = 0.075 * _GIB


def step_timelines(
    config: ModelConfig,
    layout: Layout,
    *,
    length: int,
    sequences: int,
    accumulation: int,
    optimizer: str = "adamw",
    compiled: bool = True,
    traits: Traits = PILEDRIVER,
    kind: str = "cuda",
    stages: tuple[Stage, ...] | None = None,
    every_rank: bool = False,
    largest_only: bool = False,
) -> list[Timeline]:
    """Return the timeline of each kind of rank: one without pp, else those of the distinct pipeline ranks.

    With `every_rank`, or with stages of given sizes, those of all pipeline ranks. With `largest_only` ranks are left
    out that hold no more blocks and fewer micro-batches than the first, and kept activations are one owner.
    """
    stages = stages or stages_of_layout(config, layout)
    settings: dict[str, Any] = {
        "length": length,
        "sequences": sequences,
        "accumulation": accumulation,
        "optimizer": optimizer,
        "compiled": compiled,
        "traits": traits,
        "kind": kind,
        "brief": largest_only,
    }
    if layout.pp == 1:
        return [rank_timeline(config, layout, [stages[0]], 0, **settings)]
    own = [[stages[index] for index in many] for many in stages_by_rank(layout)]
    ranks = list(range(layout.pp)) if layout.stage_blocks is not None or every_rank else _distinct(layout)
    if largest_only and len(ranks) == 3 and (config.moe is None or not config.moe.dense_layers):
        blocks = [sum(len(stage.blocks) for stage in own[rank]) for rank in ranks]
        if blocks[1] <= blocks[0]:
            del ranks[1]
    return [rank_timeline(config, layout, own[rank], rank, **settings) for rank in ranks]


def rank_timeline(
    config: ModelConfig,
    layout: Layout,
    stages: list[Stage],
    rank: int,
    *,
    length: int,
    sequences: int,
    accumulation: int,
    optimizer: str = "adamw",
    compiled: bool = True,
    traits: Traits = PILEDRIVER,
    kind: str = "cuda",
    brief: bool = False,
) -> Timeline:
    """Return the timeline of one pipeline rank that holds these stages; with `brief`, kept activations as one owner."""
    made = _Rank(
        config, layout, stages, length, sequences, accumulation, optimizer, compiled, traits, kind, rank, brief
    )
    if layout.pp == 1:
        return made.timeline("every rank")
    return made.timeline("first stage" if rank == 0 else "last stage" if rank == layout.pp - 1 else f"stage {rank}")


def _distinct(layout: Layout) -> list[int]:
    """First, second and last rank: those between hold as many blocks as the second, and fewer micro-batches."""
    return sorted({0, 1, layout.pp - 1})


class _Rank:
    """One rank of a layout."""

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        stages: list[Stage],
        length: int,
        sequences: int,
        accumulation: int,
        optimizer: str,
        compiled: bool,
        traits: Traits,
        kind: str,
        rank: int = 0,
        brief: bool = False,
    ) -> None:
        self.brief = brief
        self.config, self.layout, self.stages, self.rank = config, layout, stages, rank
        self.accumulation, self.optimizer, self.traits = accumulation, optimizer, traits
        self.setting = setting_of(layout, sequences=sequences, length=length, compiled=compiled, traits=traits)
        self.weight_size = weight_size_of(layout)
        self.matrix_size = self.setting.itemsize if self.setting.half_matrices else self.weight_size
        self.kind = kind
        self.layers = sum(len(stage.blocks) for stage in stages)
        self.first, self.last = any(one.first for one in stages), any(one.last for one in stages)
        mixed = config.moe is not None and bool(config.moe.dense_layers)
        known = {
            one: stage_states(config, one, layout, optimizer, traits)
            for index, one in enumerate(stages)
            if mixed or not index or one.first or one.last
        }
        own = [known[one] for one in (stages if mixed else stages[:1])]
        self.block: StateBytes = own[0]["block"]
        if mixed and self.layers:
            every = [one["block"].times(len(stage.blocks)) for one, stage in zip(own, stages, strict=True)]
            self.block = sum(every, StateBytes()).times(1 / self.layers)
        outer = [known[one] for one in stages if one.first or one.last]
        self.ends = sum((one["embedding"] + one["head"] for one in outer), StateBytes())
        self.embedding_gradients = 0.0
        if not (config.tied and self.last):
            # The gradient of a tied table begins with the output layer's.
            self.embedding_gradients = sum(one["embedding"].gradients for one in outer)
        kinds = [kind for stage in stages for kind in block_kinds(config, stage.blocks)]
        if len({(window, experts) for window, experts, _ in kinds}) == 1:
            kinds = [(kinds[0][0], kinds[0][1], self.layers)]
        costs = [block_cost(config, window, self.setting, experts) for window, experts, _ in kinds]
        # The kind of block that keeps the most stands for all in the list of owners; bytes are those of each.
        self.cost: BlockCost = (
            costs[0]
            if len(costs) == 1
            else max(costs or [block_cost(config, None, self.setting)], key=lambda cost: cost.backward_workspace)
        )
        self.cost_kept = self.cost.kept_bytes
        self.kept_by_block = self._kept(kinds, costs)
        self.loss: EndCost = loss_cost(config, self.setting, self.matrix_size, kind)
        self.embedding: EndCost = embedding_cost(config, self.setting, self.matrix_size)

    def _kept(self, kinds: list[tuple[int | None, bool, int]], costs: list[BlockCost]) -> float:
        """Mean bytes that a block keeps for one micro-batch; every n-th may be recomputed."""
        layout, count = self.layout, max(self.layers, 1)
        kept = self.cost_kept
        if len(costs) > 1:
            kept = sum(cost.kept_bytes * kind[2] for cost, kind in zip(costs, kinds, strict=True)) / count
        if layout.activations in ("full", "selective") and layout.activation_every > 1:
            whole = replace(self.setting, activations="keep")
            plain = sum(n * block_cost(self.config, window, whole, e).kept_bytes for window, e, n in kinds) / count
            share = 1 / layout.activation_every
            kept = share * kept + (1 - share) * plain
        if layout.activation_offload and count > 1:
            kept = 2 * kept / count  # the block at work and the next one are on the device
        return kept

    def timeline(self, name: str) -> Timeline:
        """Return the phases of this rank."""
        phases = [self._start(), self._forward()]
        if self.last:
            phases.append(self._loss())
        phases += [self._backward(first=False), self._backward(first=True)]
        if self.first:
            phases.append(self._embedding_backward())
        phases.append(self._step())
        host = self.block.host * self.layers + self.ends.host
        if self.layout.offloads and self.layout.tiers.steps_by_block:
            host += self.layout.tiers.buffers * self.layout.tiers.buffer_bytes
        if self.layout.activation_offload:
            host += max(0, self.layers - 1) * self.cost.kept_bytes
        groups = sum(size > 1 for size in (self.layout.tp, self.layout.pp, self.layout.cp, self.layout.ep))
        groups += shard_ranks(self.layout) > 1
        groups += (self.layout.dp_replicate or 1) > 1
        peak = max(phases, key=lambda phase: phase.bytes)
        return Timeline(
            rank=name,
            phases=tuple(phases),
            host=host,
            disk=self.block.disk * self.layers + self.ends.disk,
            communicators=groups,
            peak=peak,
            pipeline_rank=self.rank,
            stranded=self._stranded(phases, peak),
        )

    def _stranded(self, phases: list[Phase], peak: Phase) -> float:
        """Bytes that the allocator holds beside the peak."""
        if peak.name == "loss" and not self.traits.chunked_loss:
            # Whole logits are larger than anything that the forward freed.
            return self.loss.stranded + self.cost.forward_workspace
        freed = [max((one.bytes for one in self.cost.kept), default=0.0)]
        freed += [one.bytes for one in self.loss.forward_peak] if self.last else []
        table = 0.0
        if self.config.tied and self.first and self.last and not self.traits.copying_loss:
            table = max((one.bytes for one in self.embedding.backward_peak), default=0.0)
        waiting = max(0, self.layers - 2) * self.cost_kept if self.layout.activation_offload else 0.0
        ends = bool(self.ends.elements)
        sizes = step_tensors(self.config, self.optimizer, self.layout, ends=ends, layers=self.layers)
        return stranded_bytes(phases, peak, freed=freed, table=table, in_step=sizes, waiting=waiting)

    def _fixed(self, *, gradients: float = 0.0) -> list[Owner]:
        return [*self._at_rest, Owner("gradients", "gradients", gradients)] if gradients else [*self._at_rest]

    @functools.cached_property
    def _at_rest(self) -> tuple[Owner, ...]:
        layers = self.layers
        return (
            Owner("weights", "weights of blocks", layers * self.block.weights),
            Owner("weights", "weights of embedding and output", self.ends.weights),
            Owner("optimizer states", f"{self.optimizer} states", layers * self.block.states + self.ends.states),
            Owner("workspace", "library workspaces", _LIBRARY_BYTES if self.kind == "cuda" else 0.0),
            *self._received(),
        )

    def _received(self) -> tuple[Owner, ...]:
        """A pipeline's buffers for what other ranks send: one for each micro-batch of a step, kept between steps.

        Those of activations become the kept inputs of a stage's first block while a micro-batch is in flight.
        """
        if self.layout.pp == 1 or not self.traits.stage_buffers:
            return ()
        own = stages_by_rank(self.layout)[self.rank]
        inputs = sum(number > 0 and number - 1 not in own for number in own)
        gradients = sum(number < self.layout.stages - 1 and number + 1 not in own for number in own)
        waiting = max(0.0, self.accumulation - self._in_flight)
        size = self._border_bytes
        return (
            Owner("communication buffers", "activations from the stage before", inputs * waiting * size),
            Owner("communication buffers", "gradients from the next stage", gradients * self.accumulation * size),
        )

    @property
    def _border_bytes(self) -> float:
        """Bytes that a stage sends to the next for one micro-batch."""
        size = self.setting.tokens * self.config.dim * self.setting.itemsize
        return size / self.layout.tp if self.traits.scatter_sends else size

    @property
    def _all_gradients(self) -> float:
        return self.layers * self.block.gradients + self.ends.gradients

    def _earlier_gradients(self) -> float:
        """Gradients that are alive when a later micro-batch begins."""
        if self.traits.master_copy:
            return self._all_gradients  # a buffer that always exists
        if self.accumulation == 1:
            return 0.0
        if self.layout.zero < 2:
            return self._all_gradients
        # Until the last micro-batch gradients are local sums, not sharded; zero 3 sums them in fp32.
        size = max(self.weight_size, 4 if self.layout.zero == 3 else self.weight_size)
        return size * (self.layers * self.block.elements + self.ends.elements)

    @property
    def _in_flight(self) -> float:
        """Micro-batches whose activations are alive at once on this rank, in units of all its blocks."""
        layout, count = self.layout, self.accumulation
        if layout.pp == 1:
            return 1.0
        after = layout.pp - self.rank
        if layout.schedule == "gpipe":
            return float(count)
        if layout.schedule == "1f1b":
            return float(min(count, after))
        per = layout.stages // layout.pp
        if layout.schedule == "looped-bfs":
            return float(count)
        if layout.schedule in ("zbv", "dualpipev"):
            return min(count, layout.pp)
        chunks = (after - 1) * 2 + (per - 1) * layout.pp + 1
        return min(float(count), chunks / per)

    def _fullest(self) -> tuple[float, float]:
        """Micro-batches in flight and bytes of earlier gradients, at the moment that has the most of both.

        Where a pipeline rank runs all its forwards first, no gradient exists while all of them are in flight; after
        the first backward those of one of its stages do.
        """
        most, earlier = self._in_flight, self._earlier_gradients()
        if self.traits.master_copy or not self._runs_forwards_first:
            return most, earlier
        stages = len(self.stages)
        kept = self.layers * self.kept_by_block
        return max((most, 0.0), (most - 1 / stages, earlier / stages), key=lambda pair: pair[0] * kept + pair[1])

    @property
    def _runs_forwards_first(self) -> bool:
        """Whether a pipeline rank runs the forwards of all micro-batches before its first backward."""
        return self.layout.pp > 1 and self._in_flight >= self.accumulation

    @property
    def _after_a_backward(self) -> float:
        """Micro-batches in flight when all stages of a rank have gradients for the first time, but for its last block.

        Of several stages that ran all forwards first, one has run its backwards when the next begins.
        """
        most, stages = self._in_flight, len(self.stages)
        return most * (1 - 1 / stages) if self._runs_forwards_first and stages > 1 else most - 1.0

    def _gathered(self, blocks: int, *, root: bool = True) -> list[Owner]:
        """Zero 3: blocks gathered in the compute dtype, the copy that the collective fills, and the root's.

        A pipeline keeps a stage gathered from its first backward to its last.
        """
        if self.layout.zero != 3 or shard_ranks(self.layout) == 1:
            return []
        if blocks > 1:
            blocks = min(self.layers, blocks - 1 + max(1, self.layout.prefetch))
        if self.layout.pp > 1 and self.accumulation > 1:
            blocks = max(blocks, self.layers)
        size = self.setting.itemsize
        block = self.block.elements * size
        found = [
            Owner("gathered parameters", f"{blocks} gathered blocks", blocks * block),
            Owner("communication buffers", "all-gather output", block * (1 + 1 / shard_ranks(self.layout))),
        ]
        if root:
            found.append(Owner("gathered parameters", "gathered embedding and output", self.ends.elements * size))
        return found

    def _reduce_buffers(self) -> list[Owner]:
        layout = self.layout
        if layout.zero == 3 and shard_ranks(layout) > 1:
            # Gradients in the compute dtype, then fp32 input and output of the reduce-scatter.
            size = self.setting.itemsize
            block = self.block.elements
            return [
                Owner("gradients", "gradients of a gathered block", block * size),
                Owner("communication buffers", "reduce-scatter input", block * 4),
            ]
        ranks = (layout.dp_replicate or 1) * (layout.dp_shard or 1) * layout.cp
        if ranks == 1:
            return []
        bucket = max(BUCKET_BYTES, self.weight_size * self.block.elements / 3)
        return [Owner("communication buffers", "gradient buckets", 2.0 * bucket)]

    def _kept_owners(self, share: float) -> list[Owner]:
        """The kept activations of `share` micro-batches: by tensor, over all blocks."""
        if not share:
            return []
        scale = share * self.layers * self.kept_by_block / max(self.cost_kept, 1.0)
        found = [Owner("kept activations", name, scale * size) for name, size in self._kept_tensors]
        if self.first:
            found.append(Owner("kept activations", "tokens", share * sum(one.bytes for one in self.embedding.kept)))
        if self.layout.pp > 1 and self.traits.stage_buffers:
            # Their backward starts from them.
            outputs = sum(not stage.last for stage in self.stages) * share * self._border_bytes
            found.append(Owner("kept activations", "outputs of stages", outputs))
        return found

    @functools.cached_property
    def _kept_tensors(self) -> list[tuple[str, float]]:
        if self.brief:
            return [(f"what {self.layers} blocks keep", self.cost_kept)]
        return [(f"{one.name} of {self.layers} blocks", one.bytes) for one in self.cost.kept]

    def _start(self) -> Phase:
        gradients = self._all_gradients if self.traits.master_copy else 0.0
        return make_phase("before the forward", self._fixed(gradients=gradients))

    def _forward(self) -> Phase:
        in_flight, earlier = self._fullest()
        owners = self._fixed(gradients=earlier)
        owners += self._kept_owners(in_flight)
        owners += self._gathered(2)
        owners.append(Owner("workspace", "temporaries of a block's forward", self.cost.forward_workspace))
        return make_phase("forward, last block", owners)

    def _loss(self) -> Phase:
        in_flight, earlier = self._fullest()
        owners = self._fixed(gradients=earlier)
        owners += self._kept_owners(in_flight)
        owners += self._gathered(1)
        both = max(self.loss.forward_peak, self.loss.backward_peak, key=lambda many: sum(one.bytes for one in many))
        owners += [Owner("loss", one.name, one.bytes) for one in (*self.loss.kept, *both)]
        return make_phase("loss", owners)

    def _backward(self, *, first: bool) -> Phase:
        """The backward of the last block (all activations alive) or of the first one (most gradients alive).

        At its widest place, the MLP, the gradients of a block's other weights and of the embedding do not exist yet.
        """
        blocks = (self.layers - 1 if first else 0) * self.block.gradients
        gradients = blocks + self.ends.gradients - self.embedding_gradients + self._gradients_at_mlp()
        alive, earlier = self._fullest()
        if first:
            alive, earlier = self._after_a_backward + 1.0 / max(self.layers, 1), self._earlier_gradients()
        owners = self._fixed(gradients=max(gradients, earlier))
        if self.layout.activation_offload and self.layers > 2:
            alive *= 1.7  # besides the block at work and the one that comes back, one that has just been used
        owners += self._kept_owners(max(alive, 0.0))
        owners += self._gathered(2)
        owners += self._reduce_buffers()
        owners.append(Owner("workspace", "temporaries of a block's backward", self.cost.backward_workspace))
        if self.layout.offloads:
            size = 2 * self.weight_size if self.accumulation > 1 else self.weight_size
            owners.append(Owner("gradients", "gradients on their way to the host", size * self.block.elements))
            if self.layout.streams_parameters:
                both = 2 * self.setting.itemsize * self.block.elements
                owners.append(Owner("gathered parameters", "two blocks' weights on the device", both))
        if self.accumulation > 1 and self.layout.zero < 2:
            # A new gradient exists beside the sum that it is added to.
            owners.append(Owner("gradients", "gradients of one block", self.block.gradients))
        return make_phase("backward, first block" if first else "backward, last block", owners)

    def _gradients_at_mlp(self) -> float:
        """Gradients of a block's own weights beside the one in its workspace: of the MLP's last product.

        Where the rows of all experts are recomputed and their gradients exist, none of their weights' does.
        """
        if self.config.moe is not None:
            return 0.0 if self.layout.activations == "full" else self.block.gradients / 3
        last = self.config.mlp_dim * self.config.dim / self.layout.tp
        return self.block.gradients * min(1.0, last / max(self.block.elements, 1.0))

    def _embedding_backward(self) -> Phase:
        owners = self._fixed(gradients=self._all_gradients)
        owners += self._kept_owners(max(self._in_flight - 1.0, 0.0))
        owners += self._gathered(0)
        owners += self._reduce_buffers()
        if self.config.tied and self.last:
            # Beside the output layer's gradient of the same weight.
            owners += [Owner("gradients", one.name, one.bytes) for one in self.embedding.backward_peak]
        return make_phase("backward, embedding", owners)

    def _step(self) -> Phase:
        owners = self._fixed(gradients=self._all_gradients)
        owners += optimizer_workspace(self.config, self.optimizer, self.layout, self.block, self.ends, self.layers)
        return make_phase("optimizer step", owners)
