"""Seconds of a step: what does not depend on how a layout is written, and what must grow smoothly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piledriver.core.config import from_mapping
from piledriver.engine.layout import Layout
from piledriver.models.config import ModelConfig
from piledriver.models.presets import preset
from piledriver.plan.hardware.parse import parse_hardware
from piledriver.plan.time.links import Axis, collective_seconds
from piledriver.plan.time.rates import Efficiency
from piledriver.plan.time.step import StepTime, step_time


def _seconds(layout: Layout, *, optimizer: str = "adamw", accumulation: int = 16) -> StepTime:
    cluster = parse_hardware("64xh100-80g")
    config = replace(preset("llama-3-8b"), tied=False)
    return step_time(
        config,
        layout.on(cluster.count),
        cluster,
        length=4096,
        sequences=1,
        accumulation=accumulation,
        optimizer=optimizer,
    )


def test_a_rank_updates_and_reduces_all_of_its_stages() -> None:
    one = _seconds(Layout(zero=1, pp=4, precision="bf16"))
    several = _seconds(
        Layout(zero=1, pp=4, schedule="interleaved-1f1b", stages_per_rank=4, precision="bf16"),
    )
    # The first rank of one has the embedding too.
    assert several.optimizer == pytest.approx(one.optimizer, rel=0.35)
    assert several.data > 0.1 * one.data
    assert several.bubble < 0.5 * one.bubble


def test_host_time_of_an_optimizer_hides_behind_a_busy_device() -> None:
    config, cluster = preset("gpt2-124m"), parse_hardware("1xh200")

    def optimizer_seconds(sequences: int) -> float:
        layout = Layout(precision="bf16").on(1)
        made = step_time(
            config, layout, cluster, length=1024, sequences=sequences, accumulation=1, optimizer="adamw8bit"
        )
        return made.optimizer

    assert optimizer_seconds(64) < 0.5 * optimizer_seconds(1)


def test_experts_cost_the_same_for_even_and_odd_rows() -> None:
    moe = {"experts": 24, "experts_per_token": 3, "expert_dim": 768}
    shape = {"vocab_size": 32000, "dim": 1280, "layers": 4, "heads": 10, "mlp_dim": 768, "max_positions": 1536}
    config = from_mapping(ModelConfig, {**shape, "moe": moe}, "test")
    cluster = parse_hardware("1xh200")
    layout = Layout(precision="bf16").on(1)
    taken = [
        step_time(config, layout, cluster, length=1536, sequences=count, accumulation=1).compute / count
        for count in range(8, 17)
    ]
    assert max(taken) < 1.2 * min(taken)


def test_small_all_reduces_wait_and_large_ones_fill_the_link() -> None:
    # A100 in one node, as published tables of all-reduces have it: 8 ranks, 16 MiB in 232 us, 1 GiB in 8.2 ms.
    machine = parse_hardware("8xa100-80g")
    for size, measured in ((16, 232e-6), (64, 580e-6), (1024, 8193e-6)):
        said = collective_seconds("all-reduce", size * 2**20, Axis(8, 1), machine, Efficiency())
        assert said == pytest.approx(measured, rel=0.2)


def test_every_second_block_costs_half_of_the_recomputation() -> None:
    every, second = (
        _seconds(Layout(zero=3, precision="bf16", activations="full", activation_every=count)) for count in (1, 2)
    )
    assert second.recompute == pytest.approx(every.recompute / 2)
    assert second.compute == every.compute


def test_weights_are_streamed_for_each_micro_batch_and_as_shards_with_zero_3() -> None:
    def offload(zero: int, accumulation: int) -> float:
        layout = Layout(zero=zero, offload="parameters", precision="bf16")  # type: ignore[arg-type]
        return _seconds(layout, accumulation=accumulation).offload

    once, twice, thrice = (offload(3, count) for count in (1, 2, 3))
    assert 0 < twice - once == pytest.approx(thrice - twice)
    assert offload(1, 3) - offload(1, 2) > 30 * (thrice - twice)


def test_activations_that_leave_the_device_wait_for_the_host_link() -> None:
    kept, left = (_seconds(Layout(zero=3, precision="bf16", activation_offload=on)) for on in (False, True))
    assert kept.offload == 0.0 < left.offload
