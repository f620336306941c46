"""The memory of one step as a timeline: phases, each with the bytes of every category, on one kind of rank.

The phases follow the engine: weights and states at rest, kept activations growing through the forward, the loss, the
backward from the last block to the first while gradients replace activations, the optimizer step.
"""

from __future__ import annotations

from typing import Any

from piledriver.engine.layout import Layout
from piledriver.models.config import ModelConfig
from piledriver.plan.blocks.parameters import Stage, stages_by_rank, stages_of_layout
from piledriver.plan.blocks.setting import PILEDRIVER, Traits
from piledriver.plan.memory.phases import Timeline
from piledriver.plan.memory.rank import Rank
from piledriver.plan.memory.step_phases import timeline_of_rank


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
        return [timeline_of_rank(Rank(config, layout, [stages[0]], **settings))]
    own = [[stages[index] for index in many] for many in stages_by_rank(layout)]
    ranks = list(range(layout.pp)) if layout.stage_blocks is not None or every_rank else _distinct(layout)
    if largest_only and len(ranks) == 3 and (config.moe is None or not config.moe.dense_layers):
        blocks = [sum(len(stage.blocks) for stage in own[rank]) for rank in ranks]
        if blocks[1] <= blocks[0]:
            del ranks[1]
    return [timeline_of_rank(Rank(config, layout, own[rank], rank, **settings)) for rank in ranks]


def _distinct(layout: Layout) -> list[int]:
    """First, second and last rank: those between hold as many blocks as the second, and fewer micro-batches."""
    return sorted({0, 1, layout.pp - 1})
