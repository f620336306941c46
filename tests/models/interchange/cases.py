"""Tiny configs of transformers that use every switch of each family: short windows, scaled rotary frequencies, ..."""

from __future__ import annotations

from typing import Any

VOCAB = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
GPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16}
MOE: dict[str, Any] = {**GQA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT: dict[str, Any] = {
    **SMALL,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 2.0, 4.0],
    "original_max_position_embeddings": 16,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", GPT),
    "gpt2-inner": ("gpt2", {**GPT, "n_layer": 1, "n_inner": 80}),
    "neox": ("gpt_neox", {**SMALL, "intermediate_size": 128}),
    "neox-serial-no-bias": ("gpt_neox", {**SMALL, "use_parallel_residual": False, "attention_bias": False}),
    "llama-mha": ("llama", SMALL),
    "llama3-gqa": ("llama", {**GQA, "rope_theta": 500.0, "rope_scaling": LLAMA3}),
    "llama-biases-tied-mqa": (
        "llama",
        {**SMALL, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-linear-rope": ("llama", {**SMALL, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "head_dim": 16}),
    "llama-yarn": ("llama", {**GQA, "rope_parameters": YARN}),
    "llama-dynamic": (
        "llama",
        {**GQA, "max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}},
    ),
    "mistral-window": ("mistral", {**GQA, "sliding_window": 7}),
    "mistral": ("mistral", {**GQA, "sliding_window": None}),
    "ministral": (
        "ministral",
        {**GQA, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 16},
    ),
    "qwen2": ("qwen2", GQA),
    "qwen2-window": ("qwen2", {**GQA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**GQA, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen2-moe": (
        "qwen2_moe",
        {**MOE, "num_hidden_layers": 3, "mlp_only_layers": [0], "shared_expert_intermediate_size": 40},
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {**MOE, "num_hidden_layers": 3, "decoder_sparse_step": 2, "head_dim": 16, "norm_topk_prob": True},
    ),
    "qwen3-moe-window": ("qwen3_moe", {**MOE, "head_dim": 16, "use_sliding_window": True, "sliding_window": 6}),
    "olmo": ("olmo", {**SMALL, "clip_qkv": 0.05}),
    "olmo2": ("olmo2", GQA),
    "olmo3": ("olmo3", {**GQA, "num_hidden_layers": 4, "sliding_window": 6}),
    "olmo3-yarn": (
        "olmo3",
        {
            **GQA,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "olmoe": ("olmoe", {**GQA, "num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": 0.5}),
    "mixtral": ("mixtral", {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("gemma", {**GQA, "num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": (
        "gemma2",
        {
            **GQA,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 7,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2-uncapped": (
        "gemma2",
        {**GQA, "head_dim": 16, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": (
        "gemma3_text",
        {
            **GQA,
            "num_hidden_layers": 3,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 7,
            "sliding_window_pattern": 3,
            "rope_theta": 1000.0,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "phi": ("phi", {**GQA, "qk_layernorm": True}),
    "phi3-long": (
        "phi3",
        {**GQA, "original_max_position_embeddings": 16, "partial_rotary_factor": 0.75, "rope_scaling": LONGROPE},
    ),
    "phi3-window": ("phi3", {**SMALL, "sliding_window": 7}),
    "gpt-oss": (
        "gpt_oss",
        {
            **GQA,
            "head_dim": 16,
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "swiglu_limit": 0.3,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {**LATENT, "topk_method": "group_limited_greedy", "rope_parameters": {**YARN, "mscale": 0.7}},
    ),
    "deepseek-v2-lite": (
        "deepseek_v2",
        {**LATENT, "q_lora_rank": None, "topk_method": "greedy", "attention_bias": True},
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {**LATENT, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8}},
    ),
    "deepseek-v3-plain": (
        "deepseek_v3",
        {**LATENT, "q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1},
    ),
    "llama4": (
        "llama4_text",
        {
            **GQA,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 6,
            "floor_scale": 8,
            "attn_scale": 0.3,
        },
    ),
    "smollm3": ("smollm3", {**GQA, "num_hidden_layers": 4}),
    "smollm3-window": (
        "smollm3",
        {**GQA, "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 6},
    ),
    "starcoder2": ("starcoder2", {**GQA, "sliding_window": 7}),
    "starcoder2-no-bias": ("starcoder2", {**GQA, "use_bias": False, "tie_word_embeddings": False}),
    "stablelm": ("stablelm", {**GQA, "use_qkv_bias": True, "qk_layernorm": True, "partial_rotary_factor": 0.5}),
    "stablelm-parallel": ("stablelm", {**GQA, "use_parallel_residual": True, "partial_rotary_factor": 0.5}),
    "gptj": ("gptj", {**GPT, "rotary_dim": 4}),
    "gpt-neo": (
        "gpt_neo",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": 64,
            "window_size": 6,
            "attention_types": [[["global", "local"], 1]],
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "bigcode-mqa": ("gpt_bigcode", GPT),
    "bigcode-mha": ("gpt_bigcode", {**GPT, "multi_query": False}),
    "opt": ("opt", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1}),
    "opt-plain": (
        "opt",
        {**SMALL, "ffn_dim": 48, "enable_bias": False, "layer_norm_elementwise_affine": False, "pad_token_id": 1},
    ),
    "bloom": (
        "bloom",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "falcon-7b": ("falcon", SMALL),
    "falcon-40b": ("falcon", {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": (
        "falcon",
        {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-serial": ("falcon", {**SMALL, "parallel_attn": False, "multi_query": False, "bias": True}),
    "cohere": ("cohere", {**GQA, "logit_scale": 0.25, "use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("cohere2", {**GQA, "num_hidden_layers": 4, "logit_scale": 0.25, "sliding_window": 6}),
    "granite": (
        "granite",
        {
            **GQA,
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
        },
    ),
    "granite-moe": (
        "granitemoe",
        {
            **GQA,
            "num_local_experts": 4,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "embedding_multiplier": 3.0,
        },
    ),
    "granite-moe-shared": (
        "granitemoeshared",
        {**GQA, "num_local_experts": 4, "shared_intermediate_size": 40, "attention_multiplier": 0.3},
    ),
    "glm": ("glm", {**GQA, "head_dim": 16}),
    "glm4": ("glm4", {**GQA, "head_dim": 16}),
    "glm4-moe": (
        "glm4_moe",
        {
            **GQA,
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
        },
    ),
    "nemotron": ("nemotron", {**GQA, "head_dim": 16}),
    "exaone4": ("exaone4", {**GQA, "num_hidden_layers": 4, "sliding_window": 6}),
    "exaone4-full": ("exaone4", {**GQA, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "arcee": ("arcee", {**GQA, "mlp_bias": True, "attention_bias": True}),
    "apertus": ("apertus", {**GQA, "rope_parameters": {**LLAMA3, "rope_theta": 1000.0}}),
}
