"""Uneven pipeline stages: blocks per stage for devices of different speed or memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from piledriver.engine.layout import Layout
from piledriver.models.config import ModelConfig
from piledriver.plan.blocks.parameters import Stage, stages_of_layout
from piledriver.plan.hardware.cluster import HEADROOM, Cluster
from piledriver.plan.memory.rank import Rank
from piledriver.plan.memory.step_phases import timeline_of_rank
from piledriver.plan.prediction import Workload, compiles
from piledriver.plan.time.rates import Efficiency
from piledriver.plan.time.stage import stage_seconds


def uneven_stages(
    workload: Workload,
    layout: Layout,
    cluster: Cluster,
    *,
    sequences: int,
    efficiency: Efficiency | None = None,
) -> Layout | None:
    """Return the layout with the blocks of each stage that make the slowest stage fastest, within each memory.

    None where all devices are alike, where the schedule gives a rank several stages, or where nothing else fits.
    """
    if not cluster.others or layout.pp == 1 or layout.stages != layout.pp:
        return None
    config, pp = workload.config, layout.pp
    seconds = [_seconds(workload, layout, cluster, rank, sequences, efficiency) for rank in range(pp)]
    most = [_most_blocks(workload, layout, cluster, rank, sequences) for rank in range(pp)]
    counts = assign_blocks(seconds, most)
    if counts is None:
        return None
    made = replace(layout, stage_blocks=counts)
    alike = [len(stage.blocks) for stage in stages_of_layout(config, layout)]
    return None if list(counts) == alike else made


def assign_blocks(seconds: Sequence[Sequence[float]], most: Sequence[int]) -> tuple[int, ...] | None:
    """Return how many consecutive blocks each stage gets: the slowest as fast as can be, then the least work in all.

    `seconds[stage][block]` is what a block takes on a stage, `seconds[stage][-1]` what the stage takes besides; `most`
    are the blocks that fit. None if they do not fit together.

    >>> assign_blocks([[2.0] * 6 + [0.0], [1.0] * 6 + [0.0]], [6, 6])
    (2, 4)
    >>> assign_blocks([[2.0] * 6 + [0.0], [1.0] * 6 + [0.0]], [6, 3])
    (3, 3)
    """
    before = [[0.0, *accumulate(row[:-1])] for row in seconds]
    blocks, ends = len(before[0]) - 1, [row[-1] for row in seconds]

    def cost(stage: int, begin: int, end: int) -> float:
        return ends[stage] + before[stage][end] - before[stage][begin]

    limit = math.inf
    for largest in (True, False):
        best, cuts = [0.0] + [math.inf] * blocks, []
        for stage in range(len(seconds)):
            fewest = 0 if stage == len(seconds) - 1 else 1
            row, chosen = [math.inf] * (blocks + 1), [0] * (blocks + 1)
            for end in range(fewest, blocks + 1):
                for begin in range(max(0, end - most[stage]), end - fewest + 1):
                    took = cost(stage, begin, end)
                    value = max(best[begin], took) if largest else best[begin] + took
                    if took <= limit and value < row[end]:
                        row[end], chosen[end] = value, begin
            best = row
            cuts.append(chosen)
        if math.isinf(best[blocks]):
            return None
        # Tolerates rounding of the sums.
        limit = best[blocks] * (1 + 1e-9)
    edges = [blocks]
    for chosen in reversed(cuts):
        edges.append(chosen[edges[-1]])
    return tuple(end - begin for begin, end in pairwise(reversed(edges)))


def _seconds(
    workload: Workload,
    layout: Layout,
    cluster: Cluster,
    rank: int,
    sequences: int,
    efficiency: Efficiency | None,
) -> list[float]:
    """Seconds of each block on a stage's device, then of the embedding or the output layer on it."""
    config = workload.config
    stages = [Stage(range(layer, layer + 1), False, False) for layer in range(config.layers)]
    stages.append(Stage(range(0), rank == 0, rank == layout.pp - 1))
    return stage_seconds(
        config,
        layout,
        cluster,
        cluster.stage_device(layout.pp, rank),
        stages,
        length=workload.length,
        sequences=sequences,
        compiled=compiles(layout, cluster.device.kind),
        optimizer=workload.optimizer,
        efficiency=efficiency,
    )


def _most_blocks(workload: Workload, layout: Layout, cluster: Cluster, rank: int, sequences: int) -> int:
    """Return the most blocks that a stage's device has memory for."""
    config = workload.config
    room = cluster.stage_memory(layout.pp, rank) * (1 - HEADROOM)

    def fits(blocks: int) -> bool:
        made = Rank(
            config,
            layout,
            [_stage(config, layout, rank, blocks)],
            rank,
            length=workload.length,
            sequences=sequences,
            accumulation=max(1, round(workload.batch / layout.data_size / sequences)),
            compiled=compiles(layout, cluster.device.kind),
            optimizer=workload.optimizer,
            kind=cluster.device.kind,
        )
        return timeline_of_rank(made).driver <= room

    low, high = 0, config.layers
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _stage(config: ModelConfig, layout: Layout, rank: int, blocks: int) -> Stage:
    last = rank == layout.pp - 1
    begin = config.layers - blocks if last else 0
    return Stage(range(begin, begin + blocks), rank == 0, last)
