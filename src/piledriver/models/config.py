"""Model config: the architecture of a decoder transformer as one frozen dataclass.

Presets, the Hugging Face interchange and the model itself read it; it holds nothing about hardware, precision or
training.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from piledriver.core.errors import ConfigError

Positions = Literal["rotary", "learned", "alibi", "none"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies for contexts longer than those of pretraining."""

    kind: Literal["llama3", "linear"] = "llama3"
    """`llama3` divides only low frequencies (Llama 3.1); `linear` divides all of them."""
    factor: float = 8.0
    """Divisor of the low frequencies."""
    low_frequency_factor: float = 1.0
    """Wavelengths longer than original_max_positions / this are divided in full (llama3 only)."""
    high_frequency_factor: float = 4.0
    """Wavelengths shorter than original_max_positions / this are left alone (llama3 only)."""
    original_max_positions: int = 8192
    """Context length of pretraining (llama3 only)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts in place of the MLP of every block."""

    experts: int = 8
    """Number of experts."""
    experts_per_token: int = 2
    """Experts that each token is routed to (top-k)."""
    balance_coefficient: float = 0.01
    """Weight of the load-balance loss (Fedus et al., Switch Transformers, 2021); 0 turns it off."""
    normalise_weights: bool = True
    """Normalise the routing weights of the chosen experts to sum to one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of a decoder transformer.

    >>> config = ModelConfig(vocab_size=256, dim=64, layers=2, heads=4)
    >>> config.head_dim, config.kv_heads, config.mlp_dim
    (16, 4, 256)
    """

    vocab_size: int
    """Rows of the embedding."""
    dim: int
    """Width of the residual stream."""
    layers: int
    """Number of blocks."""
    heads: int
    """Query heads."""
    kv_heads: int = 0
    """Key and value heads: 0 for as many as query heads, 1 for multi-query, between for grouped-query."""
    head_dim: int = 0
    """Width of a head; 0 for dim / heads."""
    mlp_dim: int = 0
    """Width of the MLP, or of one expert; 0 for 4 * dim."""
    max_positions: int = 2048
    """Longest sequence."""

    positions: Positions = "rotary"
    """Positional encoding."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_fraction: float = 1.0
    """Fraction of each head that is rotated (GPT-NeoX: 0.25)."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies for long contexts."""

    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm."""
    norm_eps: float = 1e-5
    """Added to the variance."""
    norm_weight: bool = True
    """Learned scale in norms (OLMo 1: false)."""
    norm_bias: bool = False
    """Learned shift in norms."""
    norm_placement: Literal["pre", "post"] = "pre"
    """Normalise the input of each sublayer, or its output (OLMo 2)."""
    parallel_residual: bool = False
    """Attention and MLP read the same input (GPT-NeoX)."""

    mlp: Literal["gated", "plain"] = "gated"
    """activation(gate) * up, or activation(up)."""
    activation: Activation = "silu"
    """Activation function of the MLP."""
    moe: MoEConfig | None = None
    """A mixture of experts instead of one MLP."""

    qkv_bias: bool = False
    """Bias of the query, key and value projections."""
    out_bias: bool = False
    """Bias of the attention output projection."""
    mlp_bias: bool = False
    """Bias of the MLP projections."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm of queries and keys: per head (Qwen 3) or over all heads at once (OLMo 2)."""
    clip_qkv: float | None = None
    """Clamp queries, keys and values to this magnitude (OLMo 1)."""
    attention_softcap: float | None = None
    """cap * tanh(score / cap) on attention scores."""
    logit_softcap: float | None = None
    """cap * tanh(logit / cap) on the output."""
    sliding_window: int | None = None
    """Attention window: a token attends to itself and the `sliding_window - 1` tokens before it."""
    full_attention_layers: tuple[int, ...] = ()
    """Blocks that attend to the full context regardless of `sliding_window`."""

    tied: bool = True
    """Tie the output projection to the embedding."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; projections back to the residual stream get it over sqrt(2 layers)."""
    mup_base_dim: int | None = None
    """Width at which learning rate and initialisation were tuned; turns on muP scaling (Yang et al., 2022)."""

    def __post_init__(self) -> None:
        derived = {"kv_heads": self.heads, "head_dim": self.dim // max(self.heads, 1), "mlp_dim": 4 * self.dim}
        for name, value in derived.items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        for name in ("vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "mlp_dim", "max_positions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", fix="give a whole number from 1 up")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}", fix="use a divisor of heads"
            )
        if self.positions == "rotary" and (self.rotary_dim % 2 or self.rotary_dim < 2):
            raise ConfigError(
                f"rotary positions need an even number of dimensions, got {self.rotary_dim}",
                fix="change head_dim or rope_fraction",
            )
        if self.moe is not None and not 1 <= self.moe.experts_per_token <= self.moe.experts:
            raise ConfigError(
                f"experts_per_token is {self.moe.experts_per_token} of {self.moe.experts} experts",
                fix="choose from 1 to the number of experts",
            )
        if self.moe is not None and self.mlp_bias:
            raise ConfigError("mlp_bias is true, but experts have no bias", fix="set mlp_bias to false")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window is {self.sliding_window}", fix="give a whole number from 1 up, or null")
        outside = [layer for layer in self.full_attention_layers if not 0 <= layer < self.layers]
        if outside:
            raise ConfigError(f"full_attention_layers names block {outside[0]}", fix=f"use 0 to {self.layers - 1}")

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of each head that are rotated."""
        return int(self.head_dim * self.rope_fraction)

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores: 1/sqrt(head_dim), or the muP form, which equals it at the base width."""
        if self.mup_base_dim is None:
            return 1.0 / math.sqrt(self.head_dim)
        base_head_dim = self.head_dim / self.width_multiplier
        return math.sqrt(base_head_dim) / self.head_dim

    @property
    def width_multiplier(self) -> float:
        """Width relative to `mup_base_dim`; 1 without muP."""
        return 1.0 if self.mup_base_dim is None else self.dim / self.mup_base_dim

    @property
    def gate_block(self) -> int:
        """Rows of gate and up alternate in blocks of this size, so that an even split of the rows splits both."""
        return math.gcd(self.mlp_dim, 32)

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of one block, or None for full attention."""
        return None if layer in self.full_attention_layers else self.sliding_window
