"""Operators and saved tensors of eager blocks, as `blocks/launches.py` counts them, against those of real blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from piledriver.engine.layout import Layout
from piledriver.models import Transformer
from piledriver.models.config import LatentAttentionConfig, ModelConfig, MoEConfig
from piledriver.plan.blocks.launches import block_launches, block_work
from piledriver.plan.blocks.setting import setting_of
from piledriver.plan.blocks.widths import Widths

# Layer norms are one operator on a CPU too.
PLAIN: dict[str, Any] = {
    "vocab_size": 64,
    "dim": 32,
    "heads": 2,
    "mlp_dim": 32,
    "max_positions": 16,
    "norm": "layer",
    "norm_bias": False,
    "positions": "learned",
    "mlp": "plain",
}
LLAMA = {**PLAIN, "positions": "rotary", "mlp": "gated"}
MOE = MoEConfig(experts=4, experts_per_token=2, expert_dim=16)
SHAPES: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "rotary": {**PLAIN, "positions": "rotary"},
    "gated": LLAMA,
    "qk norm": {**LLAMA, "qk_norm": "head"},
    "routed": {**LLAMA, "moe": MOE},
    "shared": {**LLAMA, "moe": MoEConfig(experts=4, experts_per_token=2, expert_dim=16, shared_dim=16)},
    "latent": {
        **LLAMA,
        "head_dim": 24,
        "latent": LatentAttentionConfig(kv_rank=16, rope_dim=8, value_dim=24, q_rank=16),
    },
}
# Latent attention has two RMS norms, each of six operators on a CPU that keep two tensors more.
RMS = {"latent": (10, 4)}


class _Operators(TorchDispatchMode):  # type: ignore[misc]
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "aten"
        return func(*args, **(kwargs or {}))


def counted(shape: dict[str, Any], layers: int) -> tuple[int, int]:
    """Return the operators of a forward, and the tensors that it saves."""
    model = Transformer(ModelConfig(**shape, layers=layers), seed=0)
    model.compute_dtype = torch.bfloat16
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    saved = []
    with _Operators() as operators, torch.autograd.graph.saved_tensors_hooks(saved.append, lambda one: one):
        model(tokens, targets=tokens)
    return operators.count, len(saved)


def widths(shape: dict[str, Any], **fields: Any) -> Widths:
    config = ModelConfig(**shape, layers=2)
    layout = Layout(precision="bf16", compile=False, **fields).on(1)
    return Widths(
        config, None, setting_of(layout, sequences=1, length=16, compiled=False), experts=config.moe is not None
    )


@pytest.mark.parametrize("name", SHAPES)
def test_counts_of_a_block(name: str) -> None:
    few, many = counted(SHAPES[name], 1), counted(SHAPES[name], 2)
    found = [b - a - more for a, b, more in zip(few, many, RMS.get(name, (0, 0)), strict=True)]
    _, _, operators, saved = block_work(widths(SHAPES[name]))
    assert operators == pytest.approx(found[0], abs=2)
    assert saved == pytest.approx(found[1], abs=2)


def test_checkpointing_costs_by_saved_tensors_and_selective_by_operators() -> None:
    def extra(shape: dict[str, Any], policy: str) -> float:
        return sum(block_launches(widths(shape, activations=policy))) - sum(block_launches(widths(shape)))

    for policy in ("full", "selective"):
        assert extra(SHAPES["plain"], policy) < extra(LLAMA, policy) < extra(SHAPES["shared"], policy)
    assert extra(LLAMA, "selective") > extra(LLAMA, "full")
