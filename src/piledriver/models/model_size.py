"""Parameter counts, FLOPs per token and KV-cache bytes of a model, computed from its config alone."""

from __future__ import annotations

from piledriver.models.config import LatentAttentionConfig, ModelConfig, MoEConfig


def parameter_count(config: ModelConfig) -> int:
    """Return the exact number of parameters, counting tied ones once.

    >>> parameter_count(ModelConfig(vocab_size=256, dim=64, layers=2, heads=4))
    147776
    """
    return _parameters(config, 1 if config.moe is None else config.moe.experts)


def active_parameter_count(config: ModelConfig) -> int:
    """Return the number of parameters that one token uses: of the experts, only those that it is routed to."""
    return _parameters(config, 1 if config.moe is None else config.moe.experts_per_token)


def _parameters(config: ModelConfig, experts: int) -> int:
    dense = config.layers - config.expert_layers
    feed_forward = dense * _mlp(config, config.mlp_dim)
    if config.moe is not None:
        feed_forward += config.expert_layers * _moe(config, config.moe, experts)
    return _outside(config) + config.layers * (_attention(config) + _block_norms(config)) + feed_forward


def flops_per_token(config: ModelConfig, length: int, *, training: bool = True) -> float:
    """Return the floating-point operations per token at a sequence length: 2 per active weight, plus causal attention.

    Training costs three forward passes; recomputation is not counted (model FLOPs, as MFU is defined). An embedding
    that is only looked up costs nothing; one that is tied to the output layer counts once.
    """
    looked_up = _positions(config) + (0 if config.tied else config.vocab_size * config.dim)
    forward = 2.0 * (active_parameter_count(config) - looked_up)
    for layer in range(config.layers):
        context = mean_context(length, config.window_of(layer))
        forward += 2.0 * config.heads * (config.head_dim + config.value_dim) * context
    return forward * (3.0 if training else 1.0)


def mean_context(length: int, window: int | None) -> float:
    """Return how many tokens a token attends to on average: half the length if causal, less with a sliding window.

    >>> mean_context(1024, None), mean_context(1024, 256)
    (512.0, 224.0)
    """
    if window is None or window >= length:
        return length / 2
    return (window * window / 2 + (length - window) * window) / length


def cache_bytes_per_token(config: ModelConfig, bytes_per_value: int = 2) -> int:
    """Return the KV-cache bytes of one token over all blocks."""
    heads, width = config.cache_shape
    return 2 * config.layers * heads * width * bytes_per_value


def _outside(config: ModelConfig) -> int:
    embeddings = config.vocab_size * (config.dim * (1 if config.tied else 2) + config.head_bias)
    return embeddings + _positions(config) + (1 + config.embedding_norm) * _norm(config)


def _positions(config: ModelConfig) -> int:
    return (config.max_positions + config.position_offset) * config.dim if config.positions == "learned" else 0


def _norm(config: ModelConfig) -> int:
    return config.dim * (config.norm_weight + (config.norm_bias and config.norm == "layer"))


def _block_norms(config: ModelConfig) -> int:
    return _norm(config) * (1 if config.shared_norm else 2) * (2 if config.norm_placement == "both" else 1)


def _attention(config: ModelConfig) -> int:
    out = config.dim * (config.heads * config.value_dim + config.out_bias)
    if config.latent is not None:
        return out + _latent(config, config.latent)
    rows = (config.heads + 2 * config.kv_heads) * config.head_dim
    heads = config.heads + config.kv_heads
    biases = config.norm == "layer" and config.norm_bias
    norms = {"head": 2 * (1 + biases), "per_head": heads, "full": heads}.get(config.qk_norm, 0) * config.head_dim
    return rows * (config.dim + config.qkv_bias) + out + norms + config.heads * config.attention_sinks


def _latent(config: ModelConfig, latent: LatentAttentionConfig) -> int:
    per_input = config.dim + config.qkv_bias
    into_q = 0 if latent.q_rank is None else latent.q_rank * (per_input + 1)
    into_kv = (latent.kv_rank + latent.rope_dim) * per_input + latent.kv_rank
    keys_and_values = config.head_dim - latent.rope_dim + latent.value_dim
    heads = (latent.q_rank or config.dim) * config.head_dim + latent.kv_rank * keys_and_values
    return into_q + into_kv + config.heads * heads


def _mlp(config: ModelConfig, width: int) -> int:
    rows = width * (2 if config.mlp == "gated" else 1)
    learned = 4 if config.activation == "xielu" else 0
    return rows * (config.dim + config.mlp_bias) + config.dim * (width + config.mlp_bias) + learned


def _moe(config: ModelConfig, moe: MoEConfig, experts: int) -> int:
    router = moe.experts * (config.dim + moe.router_bias + moe.correction_bias)
    shared = _mlp(config, moe.shared_dim) + config.dim * moe.shared_gate if moe.shared_dim else 0
    return router + experts * _mlp(config, moe.expert_dim) + shared


def short_count(count: int) -> str:
    """Return a parameter count in millions or billions.

    >>> short_count(124_439_808), short_count(7_000_000_000)
    ('124.4M', '7.00B')
    """
    return f"{count / 1e9:.2f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
