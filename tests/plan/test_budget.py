"""What compiled blocks keep within a budget of activations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piledriver.models.config import ModelConfig, MoEConfig
from piledriver.plan.blocks.setting import BlockSetting
from piledriver.plan.blocks.transformer import block_cost

DENSE = ModelConfig(vocab_size=512, dim=1408, layers=1, heads=11, mlp_dim=3712, max_positions=1792, qk_norm="head")
EXPERTS = replace(DENSE, moe=MoEConfig(experts=4, experts_per_token=2, expert_dim=768))
SETTING = BlockSetting(sequences=8, length=1792, activations="budget")


def test_half_of_a_block_is_its_widest_product_and_attention() -> None:
    # As measured on an H200: of the products only the MLP's first and attention are kept.
    cost = block_cost(DENSE, None, replace(SETTING, budget=0.5))
    assert [one.name for one in cost.kept] == ["block input", "output of attention", "output of up"]
    again = [one.name for one in cost.recompute if one.kind != "memory"]
    assert again == ["qkv", "out"]


@pytest.mark.parametrize("config", [DENSE, EXPERTS])
def test_more_budget_keeps_more_and_recomputes_less(config: ModelConfig) -> None:
    costs = [block_cost(config, None, replace(SETTING, budget=share)) for share in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)]
    everything = costs[-1].kept_bytes
    for share, cost in zip((0.1, 0.3, 0.5, 0.7, 0.9), costs[:-1], strict=True):
        inputs = next(one.bytes for one in cost.kept if one.name == "block input")
        assert inputs <= cost.kept_bytes <= inputs + share * everything
    flops = [sum(one.flops for one in cost.recompute) for cost in costs]
    assert flops == sorted(flops, reverse=True)
    assert not flops[-1]
