"""Check that a model can be placed as a layout says, by the engine's own rules."""

from __future__ import annotations

from piledriver.engine.context_parallel.apply import check_model
from piledriver.engine.expert_parallel.apply import check_ep_divisible
from piledriver.engine.layout import Layout
from piledriver.engine.tensor_parallel.transformer import check_tp_divisible
from piledriver.models.config import ModelConfig
from piledriver.plan.errors import PlanError


def check_layout_of_model(config: ModelConfig, layout: Layout) -> None:
    """Raise an error that names the nearest valid size if the heads, widths or experts of a model forbid a layout."""
    if layout.tp > 1:
        check_tp_divisible(config, layout.tp)
    if layout.cp > 1:
        check_model(config, layout)
    if layout.ep > 1:
        if config.moe is None:
            raise PlanError(f"ep {layout.ep}, but the model has no experts", fix="use ep=1")
        check_ep_divisible(config.moe.experts, layout.ep)
