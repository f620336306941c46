"""Parameter counts, FLOPs per token and KV-cache bytes of a model, computed from its config alone."""

from __future__ import annotations

from piledriver.models.config import ModelConfig


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
    block = _attention(config) + _norms(config) + experts * _mlp(config) + _router(config)
    return _outside(config) + config.layers * block


def flops_per_token(config: ModelConfig, length: int, *, training: bool = True) -> float:
    """Return the floating-point operations per token at a sequence length: 2 per active weight, plus causal attention.

    Training costs three forward passes; recomputation is not counted (model FLOPs, as MFU is defined). An embedding
    that is only looked up costs nothing; one that is tied to the output layer counts once.
    """
    looked_up = (config.max_positions * config.dim if config.positions == "learned" else 0) + (
        0 if config.tied else config.vocab_size * config.dim
    )
    forward = 2.0 * (active_parameter_count(config) - looked_up)
    for layer in range(config.layers):
        forward += 4.0 * config.heads * config.head_dim * mean_context(length, config.window_of(layer))
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
    return 2 * config.layers * config.kv_heads * config.head_dim * bytes_per_value


def _outside(config: ModelConfig) -> int:
    embeddings = config.vocab_size * config.dim * (1 if config.tied else 2)
    positions = config.max_positions * config.dim if config.positions == "learned" else 0
    return embeddings + positions + _norm(config)


def _norm(config: ModelConfig) -> int:
    return config.dim * (config.norm_weight + (config.norm_bias and config.norm == "layer"))


def _norms(config: ModelConfig) -> int:
    widths = {"none": 0, "head": 2 * config.head_dim, "full": (config.heads + config.kv_heads) * config.head_dim}
    return 2 * _norm(config) + widths[config.qk_norm]


def _attention(config: ModelConfig) -> int:
    rows = (config.heads + 2 * config.kv_heads) * config.head_dim
    out = config.heads * config.head_dim * config.dim
    return rows * (config.dim + config.qkv_bias) + out + config.dim * config.out_bias


def _mlp(config: ModelConfig) -> int:
    rows = config.mlp_dim * (2 if config.mlp == "gated" else 1)
    return rows * (config.dim + config.mlp_bias) + config.dim * (config.mlp_dim + config.mlp_bias)


def _router(config: ModelConfig) -> int:
    return 0 if config.moe is None else config.moe.experts * config.dim
