"""What one pipeline rank holds: its blocks and ends, the costs of both, gradients, micro-batches in flight."""

from __future__ import annotations

import functools
from dataclasses import replace

from piledriver.engine.layout import Layout
from piledriver.models.config import ModelConfig
from piledriver.plan.blocks.ends import EndCost, embedding_cost, loss_cost
from piledriver.plan.blocks.operators import BlockCost
from piledriver.plan.blocks.parameters import Stage, block_kinds
from piledriver.plan.blocks.setting import PILEDRIVER, Traits, setting_of
from piledriver.plan.blocks.transformer import block_cost
from piledriver.plan.memory.in_flight import micro_batches_in_flight, runs_forwards_first
from piledriver.plan.memory.state_bytes import StateBytes, weight_size_of
from piledriver.plan.memory.states import stage_states


class Rank:
    """One pipeline rank of a layout that holds these stages; with `brief`, its kept activations are one owner."""

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        stages: list[Stage],
        rank: int = 0,
        *,
        length: int,
        sequences: int,
        accumulation: int,
        optimizer: str = "adamw",
        compiled: bool = True,
        traits: Traits = PILEDRIVER,
        kind: str = "cuda",
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

    @property
    def name(self) -> str:
        """What reports call it."""
        if self.layout.pp == 1:
            return "every rank"
        return {0: "first stage", self.layout.pp - 1: "last stage"}.get(self.rank, f"stage {self.rank}")

    @property
    def border_bytes(self) -> float:
        """Bytes that a stage sends to the next for one micro-batch."""
        size = self.setting.tokens * self.config.dim * self.setting.itemsize
        return size / self.layout.tp if self.traits.scatter_sends else size

    @property
    def all_gradients(self) -> float:
        """Bytes of the gradients of all its parameters."""
        return self.layers * self.block.gradients + self.ends.gradients

    @functools.cached_property
    def in_flight(self) -> float:
        """Micro-batches whose activations are alive at once, in units of all its blocks."""
        return micro_batches_in_flight(self.layout, self.rank, self.accumulation)

    def earlier_gradients(self) -> float:
        """Return the bytes of gradients that are alive when a later micro-batch begins."""
        if self.traits.master_copy:
            return self.all_gradients  # a buffer that always exists
        if self.accumulation == 1:
            return 0.0
        if self.layout.zero < 2:
            return self.all_gradients
        # Until the last micro-batch gradients are local sums, not sharded; zero 3 sums them in fp32.
        size = max(self.weight_size, 4 if self.layout.zero == 3 else self.weight_size)
        return size * (self.layers * self.block.elements + self.ends.elements)

    def fullest(self) -> tuple[float, float]:
        """Return micro-batches in flight and bytes of earlier gradients, at the moment that has the most of both.

        Where a pipeline rank runs all its forwards first, no gradient exists while all of them are in flight; after
        the first backward those of one of its stages do.
        """
        most, earlier = self.in_flight, self.earlier_gradients()
        if self.traits.master_copy or not runs_forwards_first(self.layout, self.rank, self.accumulation):
            return most, earlier
        stages = len(self.stages)
        kept = self.layers * self.kept_by_block
        return max((most, 0.0), (most - 1 / stages, earlier / stages), key=lambda pair: pair[0] * kept + pair[1])

    def gradients_at_mlp(self) -> float:
        """Return the gradients of a block's own weights beside the one in its workspace: of the MLP's last product.

        Where the rows of all experts are recomputed and their gradients exist, none of their weights' does.
        """
        if self.config.moe is not None:
            return 0.0 if self.layout.activations == "full" else self.block.gradients / 3
        last = self.config.mlp_dim * self.config.dim / self.layout.tp
        return self.block.gradients * min(1.0, last / max(self.block.elements, 1.0))
