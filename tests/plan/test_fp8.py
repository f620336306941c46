"""The products that the planner counts in fp8 are those that the engine computes in fp8."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from piledriver.engine.fp8.apply import fp8_layers, use_fp8_layers
from piledriver.engine.layout import Layout
from piledriver.models import Transformer
from piledriver.models.presets import preset
from piledriver.plan.blocks.setting import setting_of
from piledriver.plan.blocks.transformer import block_cost
from piledriver.plan.errors import PlanError
from piledriver.plan.memory.states import state_bytes_of


@pytest.mark.parametrize("name", ["gpt2-124m", "llama-1.2b", "gpt2", "tiny"])
def test_fp8_weights_are_those_of_the_engine(name: str) -> None:
    config = replace(preset(name), layers=1)
    layout = Layout(precision="fp8").on(1)
    with torch.device("meta"):
        model = Transformer(config)
    block = use_fp8_layers(model, layout).blocks["0"]  # type: ignore[union-attr,index]
    chosen = fp8_layers(block)  # type: ignore[arg-type]
    elements = {
        id(parameter): parameter.numel()
        for layer in chosen
        for parameter in block.get_submodule(layer).parameters()  # type: ignore[union-attr]
        if parameter.dim() > 1
    }
    cost = block_cost(config, None, setting_of(layout, sequences=2, length=64, compiled=True))
    assert cost.fp8_parameters == sum(elements.values())
    kept = sum(one.bytes for one in cost.kept if one.name.endswith("weights in fp8"))
    assert kept == cost.fp8_parameters


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(PlanError, match="adamww"):
        state_bytes_of((2, 2), "adamww", 4)
