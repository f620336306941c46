"""Small shapes that between them use every option of the config."""

from __future__ import annotations

from piledriver.models import ModelConfig, MoEConfig, RopeScaling

BASE = {"vocab_size": 61, "dim": 32, "layers": 2, "heads": 4, "mlp_dim": 48, "max_positions": 64, "init_std": 0.2}

SHAPES: dict[str, ModelConfig] = {
    "llama": ModelConfig(**BASE, kv_heads=2, tied=False),
    "llama3": ModelConfig(**BASE, kv_heads=1, rope_scaling=RopeScaling(factor=4.0, original_max_positions=16)),
    "gpt2": ModelConfig(
        **BASE,
        positions="learned",
        norm="layer",
        norm_bias=True,
        mlp="plain",
        activation="gelu_tanh",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    ),
    "neox": ModelConfig(
        **BASE, rope_fraction=0.5, norm="layer", norm_bias=True, parallel_residual=True, mlp="plain", activation="gelu"
    ),
    "alibi": ModelConfig(**BASE, positions="alibi", kv_heads=2, activation="relu_squared", mlp="plain"),
    "capped": ModelConfig(**BASE, kv_heads=2, attention_softcap=5.0, logit_softcap=10.0, qk_norm="head"),
    "alibi-capped": ModelConfig(**BASE, positions="alibi", attention_softcap=5.0),
    "window": ModelConfig(**BASE, sliding_window=5, full_attention_layers=(1,)),
    "olmo": ModelConfig(**BASE, norm="layer", norm_weight=False, clip_qkv=0.5),
    "olmo2": ModelConfig(**BASE, norm_placement="post", qk_norm="full", kv_heads=2, tied=False),
    "moe": ModelConfig(**BASE, moe=MoEConfig(experts=4, experts_per_token=2)),
    "moe-plain": ModelConfig(**BASE, mlp="plain", activation="relu", moe=MoEConfig(experts=3, experts_per_token=1)),
    "no-positions": ModelConfig(**BASE, positions="none"),
    "mup": ModelConfig(**BASE, mup_base_dim=16),
}
