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
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "xielu"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies for contexts longer than those of pretraining."""

    kind: Literal["llama3", "linear", "yarn", "longrope", "dynamic"] = "llama3"
    """`linear` divides all frequencies; `llama3` (Llama 3.1) and `yarn` (Peng et al., 2023) only low ones; `longrope`
    (Ding et al., 2024) each by its own factor; `dynamic` raises the base with the length of the sequence (NTK)."""
    factor: float = 8.0
    """Divisor of the low frequencies."""
    original_max_positions: int = 8192
    """Context length of pretraining; `longrope` and `dynamic` scale differently beyond it."""
    low_frequency_factor: float = 1.0
    """Wavelengths longer than original_max_positions / this are divided in full (llama3 only)."""
    high_frequency_factor: float = 4.0
    """Wavelengths shorter than original_max_positions / this are left alone (llama3 only)."""
    beta_fast: float = 32.0
    """Frequencies of at least this many turns within the original length are left alone (yarn only)."""
    beta_slow: float = 1.0
    """Frequencies of at most this many turns within the original length are divided in full (yarn only)."""
    truncate: bool = True
    """Round the dimensions between which frequencies are divided in part (yarn only)."""
    attention_factor: float | None = None
    """Factor of rotated queries and keys; null for the one of the paper (yarn and longrope)."""
    mscale: float | None = None
    """Numerator of `attention_factor`, as a coefficient of log(factor) (yarn only)."""
    mscale_all_dim: float | None = None
    """Its denominator; latent attention also multiplies scores by its square (yarn only)."""
    short_factors: tuple[float, ...] = ()
    """Divisor of each frequency up to original_max_positions (longrope only)."""
    long_factors: tuple[float, ...] = ()
    """Divisor of each frequency in longer sequences (longrope only)."""

    @property
    def depends_on_length(self) -> bool:
        """Whether frequencies change with the length of the sequence."""
        return self.kind in ("longrope", "dynamic")

    @property
    def magnitude(self) -> float:
        """Factor of the rotated dimensions of queries and keys: `attention_factor`, or the one of the paper."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope" and self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_positions))
        if self.kind != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return yarn_magnitude(self.factor, self.mscale) / yarn_magnitude(self.factor, self.mscale_all_dim)
        return yarn_magnitude(self.factor)


def yarn_magnitude(factor: float, coefficient: float = 1.0) -> float:
    """Return YaRN's factor of queries and keys, 0.1 * coefficient * log(factor) + 1 (Peng et al., 2023)."""
    return 1.0 if factor <= 1 else 0.1 * coefficient * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention (DeepSeek-AI, DeepSeek-V2, 2024): keys and values from one small vector per token."""

    kv_rank: int
    """Width of the latent vector of keys and values, which is what a cache holds."""
    rope_dim: int
    """Rotated dimensions of a head; the key's are shared by all heads."""
    value_dim: int
    """Width of the values of a head."""
    q_rank: int | None = None
    """Width of the latent vector of queries; null for a direct projection."""
    norm_eps: float = 1e-6
    """Added to the variance in the norms of the latent vectors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts in place of the MLP of blocks."""

    experts: int = 8
    """Number of experts."""
    experts_per_token: int = 2
    """Experts that each token is routed to (top-k)."""
    balance_coefficient: float = 0.01
    """Weight of the load-balance loss (Fedus et al., Switch Transformers, 2021); 0 turns it off."""
    normalise_weights: bool = True
    """Normalise the routing weights of the chosen experts to sum to one."""
    expert_dim: int = 0
    """Width of one expert; 0 for mlp_dim."""
    shared_dim: int = 0
    """Width of the shared expert, an MLP that every token passes beside its experts; 0 for none."""
    shared_gate: bool = False
    """Multiply the output of the shared expert by sigmoid(gate(x)) (Qwen 2 MoE)."""
    dense_layers: tuple[int, ...] = ()
    """Blocks with an MLP of mlp_dim instead of experts."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become weights: over all experts together, or each on its own (DeepSeek V3)."""
    weight_scale: float = 1.0
    """Factor of the routing weights."""
    weigh_inputs: bool = False
    """Multiply the input of an expert by its weight, not its output (Llama 4); for one expert per token."""
    groups: int = 1
    """Experts are chosen from the best groups only (DeepSeek); 1 for no groups."""
    groups_per_token: int = 1
    """Number of these groups."""
    group_score: Literal["max", "top2"] = "max"
    """Score of a group: its best expert (DeepSeek V2), or the sum of its best two (DeepSeek V3)."""
    correction_bias: bool = False
    """A bias of each expert's score that decides the choice and not the weight (DeepSeek V3); it is not trained."""
    router_bias: bool = False
    """Bias of the router's projection (gpt-oss)."""


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
    latent: LatentAttentionConfig | None = None
    """Latent attention (DeepSeek) instead of projected keys and values; head_dim is then the width of a query."""
    mlp_dim: int = 0
    """Width of the MLP; 0 for 4 * dim."""
    max_positions: int = 2048
    """Longest sequence."""

    positions: Positions = "rotary"
    """Positional encoding."""
    position_offset: int = 0
    """Row of the first position in a learned table (OPT: 2)."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_fraction: float = 1.0
    """Fraction of each head that is rotated (GPT-NeoX: 0.25)."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies for long contexts."""
    sliding_rope_theta: float | None = None
    """Base of the rotary frequencies of windowed blocks, which are then not scaled (Gemma 3); null for rope_theta."""
    no_rope_layers: tuple[int, ...] = ()
    """Blocks without rotary positions (SmolLM3)."""

    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm."""
    norm_eps: float = 1e-5
    """Added to the variance."""
    norm_weight: bool = True
    """Learned scale in norms (OLMo 1: false)."""
    norm_bias: bool = False
    """Learned shift in norms."""
    norm_unit_offset: bool = False
    """Norms multiply by 1 + weight (Gemma)."""
    norm_placement: Literal["pre", "post", "both"] = "pre"
    """Normalise the input of each sublayer, its output (OLMo 2), or both (Gemma 2)."""
    embedding_norm: bool = False
    """Normalise the output of the embedding (BLOOM)."""
    parallel_residual: bool = False
    """Attention and MLP read the same input (GPT-NeoX)."""
    shared_norm: bool = False
    """With parallel_residual: attention and MLP share one norm (GPT-J)."""
    embedding_scale: float = 1.0
    """Factor of the embedding's output; 0 for sqrt(dim) (Gemma)."""
    residual_scale: float = 1.0
    """Factor of what each sublayer adds to the residual stream (Granite)."""
    logit_scale: float = 1.0
    """Factor of the logits (Cohere)."""

    mlp: Literal["gated", "plain"] = "gated"
    """activation(gate) * up, or activation(up)."""
    activation: Activation = "silu"
    """Activation function of the MLP; `xielu` has learned coefficients (Huang and Schlag, 2024)."""
    gate_limit: float | None = None
    """Clamp gates from above and ups on both sides to this, and add one to the ups (gpt-oss)."""
    moe: MoEConfig | None = None
    """A mixture of experts instead of one MLP."""

    qkv_bias: bool = False
    """Bias of the query, key and value projections."""
    out_bias: bool = False
    """Bias of the attention output projection."""
    mlp_bias: bool = False
    """Bias of the MLP projections, or of those of the experts."""
    head_bias: bool = False
    """Bias of the output projection (GPT-J)."""
    qk_norm: Literal["none", "head", "per_head", "full", "after_rope"] = "none"
    """Norm of queries and keys, of the kind `norm`: over each head with shared weights (Qwen 3) or weights of its own
    (Cohere), over all heads at once (OLMo 2), or over each head after rotation without weights (Llama 4)."""
    clip_qkv: float | None = None
    """Clamp queries, keys and values to this magnitude (OLMo 1)."""
    attention_multiplier: float | None = None
    """Factor of attention scores; null for 1 / sqrt(head_dim)."""
    attention_sinks: bool = False
    """A learned score per head that takes part in the softmax and attends to nothing (gpt-oss)."""
    temperature_scale: float = 0.0
    """In blocks without rotary positions, multiply queries by 1 + this * log(1 + floor((position + 1) /
    temperature_positions)) (Llama 4); 0 for no factor."""
    temperature_positions: int = 8192
    """Positions after which that factor first grows."""
    attention_softcap: float | None = None
    """cap * tanh(score / cap) on attention scores."""
    logit_softcap: float | None = None
    """cap * tanh(logit / cap) on the output."""
    sliding_window: int | None = None
    """Attention window: a token attends to itself and the `sliding_window - 1` tokens before it."""
    chunked_attention: bool = False
    """`sliding_window` is the length of chunks instead: a token attends within its chunk (Llama 4)."""
    full_attention_layers: tuple[int, ...] = ()
    """Blocks that attend to the full context regardless of `sliding_window`."""

    tied: bool = True
    """Tie the output projection to the embedding."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; projections back to the residual stream get it over sqrt(2 layers)."""
    mup_base_dim: int | None = None
    """Width at which learning rate and initialisation were tuned; turns on muP scaling (Yang et al., 2022)."""

    def __post_init__(self) -> None:
        derived: dict[str, float] = {
            "kv_heads": self.heads,
            "head_dim": self.dim // max(self.heads, 1),
            "mlp_dim": 4 * self.dim,
            "embedding_scale": math.sqrt(max(self.dim, 0)),
        }
        for name, value in derived.items():
            if getattr(self, name) == 0:
                object.__setattr__(self, name, value)
        if self.moe is not None and self.moe.expert_dim == 0:
            object.__setattr__(self, "moe", dataclasses.replace(self.moe, expert_dim=self.mlp_dim))
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
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window is {self.sliding_window}", fix="give a whole number from 1 up, or null")
        layers = {"full_attention_layers": self.full_attention_layers, "no_rope_layers": self.no_rope_layers}
        layers["moe.dense_layers"] = () if self.moe is None else self.moe.dense_layers
        for name, listed in layers.items():
            outside = [layer for layer in listed if not 0 <= layer < self.layers]
            if outside:
                raise ConfigError(f"{name} names block {outside[0]}", fix=f"use 0 to {self.layers - 1}")
        self._check_scaling()
        self._check_experts()
        self._check_combinations()

    def _check_scaling(self) -> None:
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "longrope":
            return
        for name in ("short_factors", "long_factors"):
            if len(getattr(scaling, name)) != self.rotary_dim // 2:
                raise ConfigError(
                    f"rope_scaling.{name} has {len(getattr(scaling, name))} factors for {self.rotary_dim // 2} pairs",
                    fix="give one factor for each pair of rotated dimensions",
                )

    def _check_experts(self) -> None:
        moe = self.moe
        if moe is None:
            return
        if not 1 <= moe.experts_per_token <= moe.experts:
            raise ConfigError(
                f"experts_per_token is {moe.experts_per_token} of {moe.experts} experts",
                fix="choose from 1 to the number of experts",
            )
        if moe.experts % moe.groups or not 1 <= moe.groups_per_token <= moe.groups:
            raise ConfigError(
                f"{moe.groups_per_token} of {moe.groups} groups of {moe.experts} experts",
                fix="let groups divide experts, and choose groups_per_token from 1 to groups",
            )
        if moe.weigh_inputs and moe.experts_per_token != 1:
            raise ConfigError(
                f"weigh_inputs with {moe.experts_per_token} experts per token", fix="set experts_per_token to 1"
            )

    def _check_combinations(self) -> None:
        wrong = {
            "shared_norm without parallel_residual": self.shared_norm and not self.parallel_residual,
            "shared_norm with norm_placement post": self.shared_norm and self.norm_placement == "post",
            "head_bias with tied": self.head_bias and self.tied,
            "qk_norm full with norm layer": self.qk_norm == "full" and self.norm == "layer",
            "qk_norm full with norm_unit_offset": self.qk_norm == "full" and self.norm_unit_offset,
            "qk_norm with latent": self.qk_norm != "none" and self.latent is not None,
            "attention_sinks with latent": self.attention_sinks and self.latent is not None,
            "clip_qkv with latent": self.clip_qkv is not None and self.latent is not None,
            "latent with kv_heads below heads": self.latent is not None and self.kv_heads != self.heads,
            "activation xielu with moe or mlp gated": self.activation == "xielu"
            and (self.moe is not None or self.mlp == "gated"),
            "gate_limit with mlp plain": self.gate_limit is not None and self.mlp == "plain",
            "chunked_attention without sliding_window": self.chunked_attention and self.sliding_window is None,
        }
        for what, there in wrong.items():
            if there:
                raise ConfigError(f"{what} is not supported", fix="change one of the two")

    @property
    def rotary_dim(self) -> int:
        """Number of dimensions of each head that are rotated."""
        return int(self.head_dim * self.rope_fraction) if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Width of the values of a head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def cache_shape(self) -> tuple[int, int]:
        """(heads, width) of the keys and of the values that a cache holds per token and block.

        Latent attention caches its latent vector and its rotated key, as those of one head.
        """
        if self.latent is None:
            return self.kv_heads, self.head_dim
        return 1, self.latent.kv_rank + self.latent.rope_dim

    @property
    def attention_scale(self) -> float:
        """Factor of attention scores: 1/sqrt(head_dim), or the muP form, which equals it at the base width."""
        if self.attention_multiplier is not None:
            return self.attention_multiplier
        if self.mup_base_dim is not None:
            return math.sqrt(self.head_dim / self.width_multiplier) / self.head_dim
        scale, scaling = 1.0 / math.sqrt(self.head_dim), self.rope_scaling
        if self.latent is not None and scaling is not None and scaling.mscale_all_dim:
            scale *= yarn_magnitude(scaling.factor, scaling.mscale_all_dim) ** 2
        return scale

    @property
    def width_multiplier(self) -> float:
        """Width relative to `mup_base_dim`; 1 without muP."""
        return 1.0 if self.mup_base_dim is None else self.dim / self.mup_base_dim

    @property
    def expert_layers(self) -> int:
        """Number of blocks with experts."""
        return 0 if self.moe is None else self.layers - len(self.moe.dense_layers)

    @property
    def gate_block(self) -> int:
        """Block size of the fused gate and up projection of an MLP of mlp_dim."""
        return gate_block_of(self.mlp_dim)

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window (or chunk) of one block, or None for full attention."""
        return None if layer in self.full_attention_layers else self.sliding_window

    def rope_of(self, layer: int) -> Literal["full", "sliding"] | None:
        """Return which rotary table one block reads, or None for no rotation."""
        if self.positions != "rotary" or layer in self.no_rope_layers:
            return None
        return "sliding" if self.sliding_rope_theta is not None and self.window_of(layer) is not None else "full"

    def has_experts(self, layer: int) -> bool:
        """Return whether one block has a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers


def gate_block_of(width: int) -> int:
    """Return the size of the blocks in which rows of gate and up alternate, so that an even split of both is valid."""
    return math.gcd(width, 32)
