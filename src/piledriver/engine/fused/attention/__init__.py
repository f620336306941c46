"""Attention of `transformers`' causal models by faster kernels: masks, their check, and the functions that it calls."""

from piledriver.engine.fused.attention.interface import (
    NAMES,
    OPERATION,
    attention_models,
    install_attention,
    match_attention,
    uninstall_attention,
)

__all__ = [
    "NAMES",
    "OPERATION",
    "attention_models",
    "install_attention",
    "match_attention",
    "uninstall_attention",
]
