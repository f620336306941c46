"""Pipeline ranks that differ: a search times each kind once."""

from __future__ import annotations

from typing import Any

from piledriver.engine.layout import TWO_STAGES_A_RANK, Layout
from piledriver.models.config import ModelConfig
from piledriver.plan.blocks.parameters import Stage, block_kinds, stages_by_rank, stages_of_layout
from piledriver.plan.blocks.per_model import cached_per_model
from piledriver.plan.hardware.cluster import Cluster, Device


def rank_kinds(
    config: ModelConfig, layout: Layout, cluster: Cluster, stages: tuple[Stage, ...] | None
) -> list[tuple[int, Device, list[Stage]]]:
    """Return the pipeline ranks that differ: how many alike, their slowest device, and the stages of one."""
    if stages is None and not cluster.others:
        return [(count, cluster.device, mine) for count, mine in _usual_kinds(config, _Split(layout))]
    stages = stages or stages_of_layout(config, layout)
    devices = [cluster.stage_device(layout.pp, rank) for rank in range(layout.pp)] if cluster.others else []
    found: dict[Any, tuple[int, Device, list[Stage]]] = {}
    for rank, many in enumerate(stages_by_rank(layout)):
        device = devices[rank] if devices else cluster.device
        mine = [stages[index] for index in many]
        key = (device.name, *((blocks_key(config, one), one.first, one.last) for one in mine))
        found[key] = (found[key][0] + 1 if key in found else 1, device, mine)
    return list(found.values())


class _Split:
    """How a layout splits a model into stages; equal for layouts that split it alike."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.key = (layout.pp, layout.stages, layout.schedule in TWO_STAGES_A_RANK, layout.stage_blocks)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Split) and self.key == other.key


@cached_per_model
def _usual_kinds(config: ModelConfig, split: _Split) -> list[tuple[int, list[Stage]]]:
    stages = stages_of_layout(config, split.layout)
    found: dict[Any, tuple[int, list[Stage]]] = {}
    for many in stages_by_rank(split.layout):
        mine = [stages[index] for index in many]
        key = tuple((blocks_key(config, one), one.first, one.last) for one in mine)
        found[key] = (found[key][0] + 1 if key in found else 1, mine)
    return list(found.values())


def blocks_key(config: ModelConfig, stage: Stage) -> Any:
    """Return what tells the blocks of stages that cost the same: their number where all blocks are alike."""
    return len(stage.blocks) if len(block_kinds(config, range(config.layers))) == 1 else stage.blocks
