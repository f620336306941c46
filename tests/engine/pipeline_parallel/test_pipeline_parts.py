"""The parts of pipelines that need no processes: where models are cut, rules of schedules, batches cut into parts."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from piledriver.engine import Layout, LayoutError
from piledriver.engine.layout import MANY_STAGES_A_RANK, TWO_STAGES_A_RANK, Schedule
from piledriver.engine.pipeline_parallel.balance import balanced
from piledriver.engine.pipeline_parallel.costs import cost_of
from piledriver.engine.pipeline_parallel.microbatches import count_targets, split_microbatches
from piledriver.engine.pipeline_parallel.schedules import rank_of_stage, schedule_class, stages_of_rank
from piledriver.engine.pipeline_parallel.split import assign_stages
from piledriver.engine.pipeline_parallel.units import units_of
from piledriver.models import ModelConfig, Transformer
from piledriver.models.config import MoEConfig
from piledriver.models.model_size import flops_per_token, parameter_count

SCHEDULES: tuple[Schedule, ...] = (
    "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev",
)  # fmt: skip


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_no_cut_has_a_smaller_largest_part(costs: list[int], data: st.DataObject) -> None:
    """Against all cuts there are."""
    parts = data.draw(st.integers(1, len(costs)))
    found = balanced(costs, parts)
    assert [i for part in found for i in part] == list(range(len(costs)))
    assert len(found) == parts
    assert all(len(part) for part in found)
    largest = max(sum(costs[i] for i in part) for part in found)
    every = (
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *inner, len(costs))))
        for inner in itertools.combinations(range(1, len(costs)), parts - 1)
    )
    assert largest == min(every)


@pytest.mark.parametrize("moe", [None, MoEConfig(experts=4, experts_per_token=2)])
@pytest.mark.parametrize("tied", [False, True])
def test_costs_of_units_add_up_to_the_model(moe: MoEConfig | None, tied: bool) -> None:
    """FLOPs and parameters are those that `models.model_size` counts."""
    config = ModelConfig(vocab_size=64, dim=32, layers=3, heads=2, tied=tied, moe=moe, max_positions=128)
    with torch.device("meta"):
        model = Transformer(config)
    units = units_of(model, 128).units
    assert sum(unit.cost.flops for unit in units) == pytest.approx(
        flops_per_token(config, 128, training=False), rel=0.01
    )
    twice = config.vocab_size * config.dim if tied else 0
    assert sum(unit.cost.parameters for unit in units) == parameter_count(config) + twice - config.dim


def test_a_large_vocabulary_leaves_the_last_stage_fewer_blocks() -> None:
    """The output layer counts."""
    with torch.device("meta"):
        small, large = (Transformer(ModelConfig(vocab_size=v, dim=64, layers=8, heads=2)) for v in (64, 4096))

    def blocks(model: Transformer) -> list[int]:
        return [sum(name.startswith("blocks") for name in names) for names in assign_stages(units_of(model), 2)]

    assert blocks(small) == [4, 4]
    assert blocks(large)[0] > blocks(large)[1]
    with pytest.raises(LayoutError, match="10 stages of a model with 9 units"):
        assign_stages(units_of(small), 10)


def test_other_modules_cost_what_they_multiply() -> None:
    """Two FLOPs for each weight of a matrix, none for a lookup."""
    assert cost_of(nn.Linear(4, 6), 16).flops == 48
    assert cost_of(nn.Embedding(100, 4), 16).flops == 0


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_rules_and_places_are_torchs(schedule: Schedule, ranks: int) -> None:
    """A layout is refused exactly where torch refuses the schedule, and stages live where torch looks for them."""
    per_rank = 2 if schedule in TWO_STAGES_A_RANK | MANY_STAGES_A_RANK else 1
    count = ranks * per_rank

    def torch_takes(number: int) -> dict[int, int] | None:
        stages = [
            SimpleNamespace(
                num_stages=count, stage_index=i, group_size=ranks, group_rank=0, submod=nn.Identity(),
                is_first=i == 0, is_last=i == count - 1,
            )
            for i in range(per_rank)
        ]  # fmt: skip
        try:
            made = schedule_class(schedule)(stages[0] if per_rank == 1 else stages, number, loss_fn=nn.MSELoss())
        except ValueError:
            return None
        return dict(getattr(made, "stage_index_to_group_rank", {i: i for i in range(count)}))

    for number in range(1, 3 * ranks + 2):
        places = torch_takes(number)
        if places is None:
            with pytest.raises(
                LayoutError, match=rf"cannot run {number} microbatches.*Fix: use microbatches="
            ) as refused:
                Layout(pp=ranks, schedule=schedule, microbatches=number)
            nearest = int(str(refused.value).rpartition("=")[2])
            assert torch_takes(nearest) is not None
        else:
            layout = Layout(pp=ranks, schedule=schedule, microbatches=number)
            assert places == {stage: rank_of_stage(layout, stage) for stage in range(count)}
    assert sorted(
        s for rank in range(ranks) for s in stages_of_rank(Layout(pp=ranks, schedule=schedule), rank)
    ) == list(range(count))
    assert torch_takes(2 * count) is not None


@given(st.integers(1, 20), st.integers(1, 6))
def test_microbatches_hold_every_row_once(rows: int, parts: int) -> None:
    """In order, one shape for all, filling behind the rows that count."""
    x, y = torch.arange(rows).unsqueeze(1), torch.arange(rows).unsqueeze(1)
    made = split_microbatches(x, y, {"ids": x + 100, "flag": True}, parts)
    assert len(made) == parts
    assert len({part.inputs[0].shape for part in made}) == 1
    assert torch.equal(torch.cat([part.inputs[0][: part.rows] for part in made]), x)
    assert torch.equal(torch.cat([part.context["ids"][: part.rows] for part in made]), x + 100)
    assert torch.equal(torch.cat([part.targets for part in made]), y)
    assert sum(int(count_targets(part.padded_targets())) for part in made) == rows
    assert max(part.rows for part in made) - min(part.rows for part in made) <= 1


def test_compiled_blocks_and_a_split_backward_do_not_go_together() -> None:
    """Said when the layout is made."""
    with pytest.raises(LayoutError, match="backward in two parts"):
        Layout(pp=2, schedule="zbv", compile=True)
