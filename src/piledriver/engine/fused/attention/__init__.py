"""Attention of `transformers`' causal models by faster kernels: masks, their check, and the functions that it calls."""

from piledriver.engine.fused.attention.interface import (
    NAMES,
    OPERATION,
    attention_models,
    install_attention,
    match_attention,
    uninstall_attention,
)
from piledriver.engine.fused.attention.masks import has_kernels
from piledriver.engine.fused.attention.packing import expect_packing_only_with_positions, forget_packing

__all__ = [
    "NAMES",
    "OPERATION",
    "attention_models",
    "expect_packing_only_with_positions",
    "forget_packing",
    "has_kernels",
    "install_attention",
    "match_attention",
    "uninstall_attention",
]
