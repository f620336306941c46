"""Uneven stages: the engine cuts as the layout says, the search by speed and memory of each stage's devices."""

from __future__ import annotations

import pytest

from piledriver.engine.errors import LayoutError
from piledriver.engine.layout import Layout
from piledriver.engine.pipeline_parallel.split import assign_stages
from piledriver.engine.pipeline_parallel.units import units_of
from piledriver.models import ModelConfig, Transformer
from piledriver.models.presets import preset
from piledriver.plan import Wishes, Workload, parse_hardware, plan
from piledriver.plan.blocks.parameters import stages_of_layout
from piledriver.plan.search.choose import search_layouts

CONFIG = ModelConfig(vocab_size=64, dim=32, layers=6, heads=2, max_positions=32)


def test_the_planner_cuts_as_the_engine_does() -> None:
    layout = Layout(pp=3, stage_blocks=(1, 4, 1))
    names = assign_stages(units_of(Transformer(CONFIG)), layout.stages, layout.stage_blocks)
    blocks = [sum(name.startswith("blocks.") for name in stage) for stage in names]
    assert blocks == [len(stage.blocks) for stage in stages_of_layout(CONFIG, layout)] == [1, 4, 1]
    assert names[-1][-1] == "head"


@pytest.mark.parametrize("counts", [(1, 4), (2, 2, 2), (0, 6)])
def test_counts_that_are_not_the_model_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="stage"):
        assign_stages(units_of(Transformer(CONFIG)), 2, Layout(pp=2, stage_blocks=counts).stage_blocks)


def test_slower_devices_get_fewer_blocks(tmp_path: object) -> None:
    file = tmp_path / "uneven.yaml"  # type: ignore[operator]
    file.write_text("device: {like: a100-80g, speed: 0.5}\ncount: 1\nothers: [{device: a100-80g, count: 1}]\n")
    cluster = parse_hardware(str(file))
    workload = Workload(config=preset("llama-1.2b"), length=2048, batch=16)
    even = Layout(pp=2, precision="bf16")
    found = search_layouts(workload, cluster, Wishes(fixed=even, sequences=1))
    best = found.fitting[0]
    assert best.layout.stage_blocks is not None
    slow, fast = best.layout.stage_blocks
    assert slow < fast
    plain = next(one for one in found.fitting if one.layout.stage_blocks is None)
    assert plain.time.total / best.time.total > 1.25


def test_smaller_devices_get_fewer_blocks() -> None:
    made = plan("llama-3-8b", batch=16, hardware="4xh100-80g+4xa100-40g", length=4096)
    assert made.best.fits
    best = made.best
    for timeline in best.timelines:
        assert timeline.driver <= best.cluster.stage_memory(best.layout.pp, timeline.pipeline_rank)
