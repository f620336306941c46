"""Device maps leave room for cache and activations, keep ties together, and stream what does not fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from piledriver.models import ModelConfig, Transformer
from piledriver.models.model_size import cache_bytes_per_token
from piledriver.plan import PlanError, device_map, parse_hardware, plan_module

CONFIG = ModelConfig(vocab_size=32000, dim=2048, layers=16, heads=16, mlp_dim=5632, max_positions=4096)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.device("meta"):
        return Transformer(CONFIG)


def test_weights_cache_and_activations_fit_each_device(model: nn.Module) -> None:
    made = device_map(model, batch=4, length=4096, hardware="2xl4", dtype=torch.bfloat16)
    assert made.streamed == 0
    memory = parse_hardware("2xl4").device.memory
    for place in made.weights:
        assert made.weights[place] + made.room[place] <= memory
    cache = 4 * 4096 * cache_bytes_per_token(CONFIG)
    assert sum(made.room.values()) >= cache
    # The output layer is the embedding.
    assert made.places["embedding"] == made.places.get("head", made.places["embedding"])


def test_a_longer_batch_moves_modules_off_the_device(model: nn.Module) -> None:
    short = device_map(model, batch=1, length=512, hardware="1xl4", max_memory={0: 2.5e9}, dtype=torch.bfloat16)
    long = device_map(model, batch=8, length=512, hardware="1xl4", max_memory={0: 2.5e9}, dtype=torch.bfloat16)
    assert short.streamed < long.streamed
    assert short.seconds < long.seconds
    assert set(long.places.values()) == {0, "cpu"}


def test_what_host_memory_does_not_hold_is_on_disk(model: nn.Module) -> None:
    made = device_map(model, hardware="1xl4", length=128, max_memory={0: 1e9, "cpu": 5e8}, dtype=torch.bfloat16)
    assert set(made.places.values()) == {0, "cpu", "disk"}
    assert made.weights["cpu"] <= 5e8
    with pytest.raises(PlanError, match="lower the batch"):
        device_map(model, hardware="1xl4", batch=64, length=4096, max_memory={0: 2e9})


def test_any_module_is_planned_from_an_example() -> None:
    with torch.device("meta"):
        large = nn.Sequential(*(nn.Sequential(nn.Linear(16384, 16384), nn.ReLU()) for _ in range(12)))
    example = torch.empty(2, 16384, device="meta")
    made = plan_module(large, example, batch=64, hardware="8xa100-40g")
    assert made.fits
    assert made.layout.zero > 0
    assert made.others
    assert made.seconds <= min(one.seconds for one in made.others)
    with pytest.raises(PlanError, match="GiB too large"):
        plan_module(large, example, batch=64, hardware="1xa100-40g")
