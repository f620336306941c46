"""Settings of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from piledriver.serve.errors import ServeError


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine schedules and computes; nothing about single requests."""

    deterministic: bool = False
    """A request's tokens and log-probabilities do not depend on the other requests, the cache or the schedule."""
    max_sequences: int = 256
    """Most answers that are decoded at once."""
    token_budget: int = 0
    """Most tokens of a step; 0 for 8192 on a GPU, 512 on a CPU. Longer prompts are computed in chunks."""
    max_context: int = 0
    """Longest prompt and answer together; 0 for the model's longest."""
    block_size: int = 16
    """Tokens of a cache block."""
    cache_tokens: int = 0
    """Tokens that the KV cache holds; 0 for what `memory_fraction` leaves on a GPU, 16 full contexts on a CPU."""
    memory_fraction: float = 0.9
    """Share of a GPU's memory for weights, cache and workspace together."""
    kv_dtype: Literal["auto", "fp8", "int8"] = "auto"
    """Dtype of the KV cache: that of the model, fp8 (e4m3), or int8 with a scale for each token and head."""
    prefix_cache: bool = True
    """Reuse the cache of equal prefixes."""
    cuda_graphs: bool = True
    """Replay decode steps and short prefills of one request as CUDA graphs, captured when a size is used again."""
    fused: bool = True
    """Use the fused forward pass where it supports the model; on a CPU it keeps a packed copy of the weights."""
    speculate: Literal["none", "ngram", "draft"] = "none"
    """Guess tokens ahead: by n-grams of the sequence itself, or by a draft model. The output is the same."""
    speculate_tokens: int = 4
    """Most tokens to guess."""

    def __post_init__(self) -> None:
        for name in ("max_sequences", "block_size", "speculate_tokens"):
            if getattr(self, name) < 1:
                raise ServeError(f"{name} is {getattr(self, name)}", fix="give a whole number from 1 up")
        if self.block_size & (self.block_size - 1):
            raise ServeError(f"block_size is {self.block_size}", fix="give a power of two")
        if not 0 < self.memory_fraction <= 1:
            raise ServeError(f"memory_fraction is {self.memory_fraction}", fix="give a number over 0, up to 1")
