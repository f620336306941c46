"""Rows of `plan_gpu.py`: model shapes, and layouts x batch x optimizer that are measured with them.

A row is (shape, sequences of a micro-batch, layout, optimizer, micro-batches of a step). `KNOWN` and `UNSEEN` were
measured and the planner was corrected on them; `FRESH` has shapes that neither has, `SECOND` to `FIFTH`
more. `AGAIN` are rows that other processes disturbed, or that a window was too short for.
"""

from __future__ import annotations

from typing import Any

SMALL = {"vocab_size": 32000, "dim": 1024, "layers": 12, "heads": 16, "mlp_dim": 2816, "max_positions": 2048}
SHAPES: dict[str, Any] = {
    "124m": ("gpt2-124m", 1024),
    "1.2b": ("llama-1.2b", 2048),
    "small": (SMALL, 2048),
    "wide": ({**SMALL, "dim": 2048, "layers": 6, "heads": 16, "kv_heads": 4, "mlp_dim": 7168, "tied": False}, 2048),
    "gpt2": ("gpt2", 1024),
    "qwen": ("qwen3-0.6b", 2048),
    "pythia": ("pythia-410m", 2048),
    "moe": ({**SMALL, "layers": 6, "mlp_dim": 1024, "moe": {"experts": 8, "experts_per_token": 2}}, 1024),
}
LATENT = {"kv_rank": 256, "rope_dim": 32, "value_dim": 64, "q_rank": 512}
SHARED = {"experts": 16, "experts_per_token": 4, "expert_dim": 512, "shared_dim": 1024, "dense_layers": [0]}
# Shapes that nothing in the planner was corrected on when they were first measured.
SHAPES |= {
    "square": ({**SMALL, "vocab_size": 50304, "dim": 1536, "layers": 8, "heads": 12, "mlp_dim": 4096}, 1024),
    "deep": ({**SMALL, "dim": 512, "layers": 24, "heads": 8, "mlp_dim": 1408}, 1024),
    "long": ({**SMALL, "layers": 8, "max_positions": 8192}, 8192),
    "multi-query": (
        {**SMALL, "dim": 2048, "layers": 6, "kv_heads": 1, "mlp": "plain", "mlp_dim": 8192, "activation": "gelu"},
        1024,
    ),
    "vocabulary": ({**SMALL, "vocab_size": 256000, "layers": 8, "heads": 8}, 1024),
    "latent": ({**SMALL, "layers": 10, "head_dim": 96, "latent": LATENT}, 1024),
    "shared": ({**SMALL, "layers": 8, "head_dim": 96, "latent": LATENT, "moe": SHARED}, 1024),
    "experts": ({**SMALL, "layers": 6, "moe": {"experts": 32, "experts_per_token": 4, "expert_dim": 512}}, 1024),
    "post": ({**SMALL, "layers": 10, "norm_placement": "post", "qk_norm": "full", "tied": False}, 1024),
    "window": ({**SMALL, "layers": 8, "sliding_window": 512, "max_positions": 4096}, 4096),
    "2b": ({**SMALL, "dim": 2560, "layers": 22, "heads": 20, "kv_heads": 4, "mlp_dim": 8192, "tied": False}, 2048),
}
BF16, PURE = {"precision": "bf16"}, {"precision": "bf16-pure"}
EAGER, COMPILED = {**BF16, "compile": False}, {**BF16, "compile": "blocks"}
KNOWN: list[tuple[str, int, dict[str, Any], str, int]] = [
    # What compiles takes seconds; the first rows matter most.
    ("1.2b", 8, {**BF16, "compile": "blocks"}, "adamw", 1),
    ("124m", 32, {**BF16, "compile": "blocks"}, "adamw", 1),
    ("1.2b", 4, {**BF16, "compile": False}, "adamw", 1),
    ("124m", 16, {**BF16, "compile": False}, "adamw", 1),
    ("124m", 16, {**BF16, "compile": False, "activations": "full"}, "adamw", 1),
    ("124m", 16, {**BF16, "compile": False, "activations": "selective"}, "adamw", 1),
    ("124m", 8, {"precision": "fp32", "compile": False}, "adamw", 1),
    ("124m", 16, {**BF16, "compile": False}, "adamw", 2),
    ("small", 16, {**BF16, "compile": False}, "adamw", 1),
    ("small", 16, {**BF16, "compile": False}, "lion", 1),
    ("wide", 8, {**BF16, "compile": False}, "adamw", 1),
    ("gpt2", 16, {**BF16, "compile": False}, "adamw", 1),
    ("qwen", 4, {**BF16, "compile": False}, "adamw", 1),
    ("pythia", 4, {**BF16, "compile": False}, "adamw", 1),
    ("moe", 8, {**BF16, "compile": False}, "adamw", 1),
    ("1.2b", 4, {**PURE, "compile": False}, "adamw", 1),
    ("1.2b", 4, {**BF16, "compile": False, "activations": "full"}, "adamw", 1),
    ("wide", 8, {**BF16, "compile": "blocks"}, "adamw", 1),
    ("124m", 32, {**BF16, "compile": "blocks", "activations": "full"}, "adamw", 1),
    ("small", 16, {**BF16, "compile": "blocks"}, "adamw", 1),
    ("gpt2", 16, {**BF16, "compile": "blocks"}, "adamw", 1),
    ("1.2b", 8, {**PURE, "compile": "blocks"}, "adamw_split_bf16", 1),
    ("124m", 32, {**BF16, "compile": "blocks", "activations": "selective"}, "adamw", 1),
    ("124m", 32, {**PURE, "compile": "blocks"}, "adamw_split_bf16", 1),
    ("qwen", 4, {**BF16, "compile": "blocks"}, "adamw", 1),
    ("pythia", 4, {**BF16, "compile": "blocks"}, "adamw", 1),
    ("124m", 32, {**BF16, "compile": "blocks", "recompute_norms": True}, "adamw", 1),
    ("1.2b", 8, {**BF16, "compile": "blocks", "activations": "full"}, "adamw", 1),
    ("1.2b", 8, {"precision": "fp8", "compile": "blocks"}, "adamw", 1),
    ("moe", 8, {**BF16, "compile": "blocks"}, "adamw", 1),
    ("124m", 32, {**BF16, "compile": "model"}, "adamw", 1),
    ("small", 16, {**BF16, "compile": "blocks"}, "adamw8bit", 1),
    ("wide", 4, {**BF16, "compile": "blocks", "activations": "selective"}, "adamw", 1),
    ("1.2b", 2, {**BF16, "compile": False, "offload": "optimizer"}, "adamw", 1),
]


UNSEEN: list[tuple[str, int, dict[str, Any], str, int]] = [
    *(
        (shape, sequences, EAGER, "adamw", 1)
        for shape, sequences in (
            ("square", 8),
            ("deep", 16),
            ("long", 2),
            ("multi-query", 8),
            ("vocabulary", 8),
            ("latent", 8),
            ("shared", 8),
            ("experts", 8),
            ("post", 8),
            ("window", 4),
            ("2b", 2),
        )
    ),
    ("1.2b", 2, {**EAGER, "offload": "optimizer"}, "adamw", 1),
    ("1.2b", 2, {**EAGER, "offload": "parameters"}, "adamw", 1),
    ("square", 8, {**EAGER, "activations": "selective"}, "adamw8bit", 1),
    ("post", 8, {**EAGER, "activations": "full"}, "muon", 1),
    # The choice: every policy and micro-batch of a batch of 32 sequences, besides those above.
    ("square", 32, EAGER, "adamw", 1),
    ("square", 16, EAGER, "adamw", 2),
    ("square", 8, EAGER, "adamw", 4),
    ("square", 32, {**EAGER, "activations": "selective"}, "adamw", 1),
    ("square", 16, {**EAGER, "activations": "selective"}, "adamw", 2),
    ("square", 32, {**EAGER, "activations": "full"}, "adamw", 1),
    ("square", 16, {**EAGER, "activations": "full"}, "adamw", 2),
    ("square", 16, COMPILED, "adamw", 1),
    ("latent", 16, COMPILED, "adamw", 1),
    ("1.2b", 8, {"precision": "fp8", "compile": "blocks"}, "adamw", 1),
    ("long", 2, COMPILED, "adamw", 1),
    ("experts", 16, COMPILED, "adamw", 1),
    ("shared", 16, COMPILED, "adamw", 1),
    ("2b", 4, {"precision": "fp8", "compile": "blocks"}, "adamw", 1),
    ("window", 8, COMPILED, "adamw", 1),
    ("multi-query", 16, COMPILED, "adamw", 1),
]


# Shapes and settings that no row above has; measured after the predictions were written.
SHAPES |= {
    "grouped": (
        {
            **SMALL,
            "vocab_size": 65536,
            "dim": 1536,
            "layers": 14,
            "heads": 24,
            "kv_heads": 8,
            "mlp_dim": 5120,
            "max_positions": 3072,
        },
        3072,
    ),
    "plain": (
        {
            **SMALL,
            "dim": 1280,
            "layers": 16,
            "heads": 20,
            "mlp": "plain",
            "mlp_dim": 5120,
            "activation": "gelu",
            "norm": "layer",
            "tied": False,
        },
        1536,
    ),
    "tall": ({**SMALL, "vocab_size": 100352, "dim": 2304, "layers": 10, "heads": 18, "mlp_dim": 6144}, 2048),
    "slim latent": (
        {
            **SMALL,
            "dim": 1280,
            "layers": 8,
            "heads": 10,
            "head_dim": 128,
            "mlp_dim": 3584,
            "latent": {"kv_rank": 320, "rope_dim": 64, "value_dim": 128, "q_rank": None},
        },
        1536,
    ),
    "many experts": (
        {
            **SMALL,
            "dim": 1280,
            "layers": 6,
            "heads": 10,
            "moe": {"experts": 24, "experts_per_token": 3, "expert_dim": 768},
        },
        1536,
    ),
    "both": (
        {
            **SMALL,
            "dim": 1152,
            "layers": 8,
            "heads": 12,
            "head_dim": 96,
            "mlp_dim": 3072,
            "latent": {"kv_rank": 288, "rope_dim": 32, "value_dim": 96, "q_rank": 576},
            "moe": {"experts": 20, "experts_per_token": 4, "expert_dim": 640, "shared_dim": 1280, "dense_layers": [0]},
        },
        1536,
    ),
    "heavy": ({**SMALL, "dim": 4096, "layers": 28, "heads": 32, "kv_heads": 8, "mlp_dim": 11008}, 256),
    "thin": ({**SMALL, "dim": 640, "layers": 20, "heads": 10, "mlp_dim": 1792}, 1024),
    "pick": ({**SMALL, "vocab_size": 49152, "dim": 1792, "layers": 10, "heads": 14, "mlp_dim": 4864}, 2048),
}
FP8, FP8_PURE = {"precision": "fp8", "compile": "blocks"}, {"precision": "fp8-pure", "compile": "blocks"}
FRESH: list[tuple[str, int, dict[str, Any], str, int]] = [
    ("grouped", 6, EAGER, "muon", 1),
    ("slim latent", 10, COMPILED, "adamw", 1),
    ("many experts", 10, COMPILED, "adamw", 1),
    ("tall", 6, FP8, "adamw", 1),
    ("plain", 12, EAGER, "lion", 1),
    ("grouped", 6, COMPILED, "adamw", 1),
    ("both", 8, COMPILED, "adamw", 1),
    ("tall", 5, EAGER, "adamw", 2),
    ("plain", 12, {**EAGER, "activations": "full"}, "adamw", 1),
    ("thin", 24, COMPILED, "adamw", 1),
    ("plain", 10, COMPILED, "muon", 1),
    ("slim latent", 6, EAGER, "adamw", 1),
    ("many experts", 6, {**EAGER, "activations": "full"}, "adamw", 1),
    ("tall", 6, FP8_PURE, "adamw_split_bf16", 1),
    ("grouped", 7, {**COMPILED, "activations": "selective"}, "adamw8bit", 1),
    ("thin", 8, EAGER, "adamw", 1),
    ("grouped", 3, {**PURE, "compile": False}, "adamw_split", 1),
    ("tall", 7, {**COMPILED, "activations": "full"}, "adamw", 1),
    ("both", 6, EAGER, "adamw", 1),
    ("plain", 6, {"precision": "fp32", "compile": False}, "adamw", 1),
    ("tall", 3, {**EAGER, "offload": "optimizer"}, "adamw", 1),
    ("plain", 9, {**COMPILED, "recompute_norms": True}, "adamw", 3),
    ("grouped", 4, {**EAGER, "activations": "selective"}, "adamw", 1),
    ("many experts", 8, {**COMPILED, "activations": "full"}, "adamw", 1),
    ("tall", 4, {**PURE, "compile": "blocks"}, "adamw_split_bf16", 1),
    ("slim latent", 8, {**COMPILED, "activations": "selective"}, "adamw", 2),
    ("both", 5, {**EAGER, "activations": "full"}, "muon", 1),
]

# A second blind set: shapes that no row above has, what was missed in the first, and what could not be measured then.
# Rows that do not compile come first: they wait for the host, and nothing should run beside them.
SHAPES |= {
    "few experts": (
        {
            **SMALL,
            "vocab_size": 40960,
            "dim": 1536,
            "layers": 5,
            "heads": 12,
            "kv_heads": 4,
            "moe": {"experts": 12, "experts_per_token": 2, "expert_dim": 1408},
        },
        1024,
    ),
    "broad": (
        {**SMALL, "vocab_size": 73728, "dim": 2560, "layers": 7, "heads": 20, "kv_heads": 5, "mlp_dim": 6656},
        1024,
    ),
    "learned": (
        {
            **SMALL,
            "vocab_size": 50304,
            "dim": 896,
            "layers": 18,
            "heads": 14,
            "mlp": "plain",
            "mlp_dim": 3584,
            "activation": "gelu",
            "norm": "layer",
            "positions": "learned",
            "max_positions": 1280,
        },
        1280,
    ),
    "normed": (
        {**SMALL, "vocab_size": 48000, "dim": 1408, "layers": 11, "heads": 11, "mlp_dim": 3712, "qk_norm": "head"},
        1792,
    ),
}
SECOND: list[tuple[str, int, dict[str, Any], str, int]] = [
    ("many experts", 6, {**EAGER, "activations": "full"}, "adamw", 1),
    ("post", 8, {**EAGER, "activations": "full"}, "muon", 1),
    ("few experts", 7, {**EAGER, "activations": "full"}, "adamw", 1),
    ("few experts", 9, EAGER, "lion", 1),
    ("normed", 5, EAGER, "muon", 1),
    ("grouped", 6, EAGER, "muon", 1),
    ("both", 5, {**EAGER, "activations": "full"}, "muon", 1),
    ("learned", 9, {**EAGER, "activations": "full"}, "adamw", 2),
    ("few experts", 6, {**EAGER, "activations": "selective"}, "adamw", 1),
    ("grouped", 4, {**EAGER, "activations": "selective"}, "adamw", 1),
    ("normed", 6, {**EAGER, "activation_offload": True}, "adamw", 1),
    ("grouped", 3, {**PURE, "compile": False}, "adamw_split", 1),
    ("learned", 14, EAGER, "adamw8bit", 1),
    ("broad", 4, {**EAGER, "offload": "optimizer"}, "adamw", 1),
    ("broad", 6, {**EAGER, "offload": "parameters", "activations": "full"}, "adamw", 1),
    ("broad", 9, COMPILED, "muon", 1),
    ("grouped", 6, COMPILED, "adamw", 1),
    ("few experts", 12, {**COMPILED, "activations": "full"}, "adamw", 1),
    ("broad", 8, FP8, "adamw", 1),
    ("normed", 10, {**COMPILED, "recompute_norms": True}, "lion", 2),
    ("learned", 20, {**COMPILED, "activations": "selective"}, "adamw8bit", 1),
    ("normed", 8, {**COMPILED, "activations": "budget", "activation_budget": 0.5}, "adamw", 1),
    ("slim latent", 8, {**COMPILED, "activations": "selective"}, "adamw", 2),
    ("broad", 5, {**PURE, "compile": "blocks"}, "adamw_split_bf16", 1),
    ("learned", 2, COMPILED, "adamw", 1),
    ("plain", 9, {**COMPILED, "recompute_norms": True}, "adamw", 3),
]
# A third blind set, after what the second taught; then rows that wait for the host, again with nothing beside them.
SHAPES |= {
    "fine experts": (
        {
            **SMALL,
            "dim": 768,
            "layers": 9,
            "heads": 12,
            "kv_heads": 4,
            "moe": {"experts": 16, "experts_per_token": 2, "expert_dim": 384, "shared_dim": 384},
        },
        1024,
    ),
    "slight": ({**SMALL, "vocab_size": 24576, "dim": 896, "layers": 15, "heads": 7, "mlp_dim": 2432}, 768),
}
THIRD: list[tuple[str, int, dict[str, Any], str, int]] = [
    ("fine experts", 7, {**EAGER, "activations": "full"}, "adamw", 1),
    ("slight", 11, EAGER, "muon", 1),
    ("few experts", 11, EAGER, "muon", 1),
    ("slight", 9, {**EAGER, "activations": "selective"}, "lion", 1),
    ("fine experts", 6, {**EAGER, "activations": "selective"}, "adamw", 1),
    ("learned", 5, {**EAGER, "activations": "full"}, "adamw8bit", 1),
    ("slight", 8, {**EAGER, "activations": "full"}, "adamw", 2),
    ("both", 7, EAGER, "lion", 1),
    ("fine experts", 9, EAGER, "adamw", 1),
    ("broad", 3, {**EAGER, "offload": "optimizer"}, "adamw", 1),
    ("124m", 16, EAGER, "adamw", 1),
    ("124m", 16, {**EAGER, "activations": "full"}, "adamw", 1),
    ("124m", 16, {**EAGER, "activations": "selective"}, "adamw", 1),
    ("both", 6, EAGER, "adamw", 1),
    ("experts", 8, EAGER, "adamw", 1),
    ("deep", 16, EAGER, "adamw", 1),
    ("post", 8, EAGER, "adamw", 1),
    ("thin", 8, EAGER, "adamw", 1),
    ("latent", 8, EAGER, "adamw", 1),
    ("shared", 8, EAGER, "adamw", 1),
    ("moe", 8, EAGER, "adamw", 1),
    ("slim latent", 6, EAGER, "adamw", 1),
    ("pythia", 4, EAGER, "adamw", 1),
    ("square", 8, {**EAGER, "activations": "selective"}, "adamw8bit", 1),
    ("124m", 16, EAGER, "adamw", 2),
    ("qwen", 4, EAGER, "adamw", 1),
]
# Rows that missed 15% or were disturbed, and what the third set did not reach, with nothing beside them; rows of Muon,
# which holds less than when they were measured.
AGAIN: list[tuple[str, int, dict[str, Any], str, int]] = [
    ("slight", 8, {**EAGER, "activations": "full"}, "adamw", 2),
    *(row for row in THIRD[7:] if row[0] in ("124m", "both", "fine experts")),
    ("few experts", 11, EAGER, "muon", 1),
    ("both", 5, {**EAGER, "activations": "full"}, "muon", 1),
    ("post", 8, {**EAGER, "activations": "full"}, "muon", 1),
    ("normed", 5, EAGER, "muon", 1),
    *(row for row in THIRD[7:] if row[0] in ("experts", "deep", "post", "thin", "shared", "slim latent", "qwen")),
    ("broad", 4, {**EAGER, "offload": "optimizer"}, "adamw", 1),
    ("broad", 6, {**EAGER, "offload": "parameters", "activations": "full"}, "adamw", 1),
    ("1.2b", 2, {**EAGER, "offload": "optimizer"}, "adamw", 1),
    ("square", 8, {**EAGER, "activations": "selective"}, "adamw8bit", 1),
]
# A fourth blind set: shapes that no row above has.
SHAPES |= {
    "stout": (
        {**SMALL, "vocab_size": 40960, "dim": 1152, "layers": 14, "heads": 9, "mlp_dim": 3072},
        1280,
    ),
    "keyed": (
        {**SMALL, "dim": 1536, "layers": 9, "heads": 12, "kv_heads": 3, "mlp_dim": 4352, "qk_norm": "head"},
        1024,
    ),
    "sparse": (
        {
            **SMALL,
            "dim": 896,
            "layers": 7,
            "heads": 7,
            "moe": {"experts": 20, "experts_per_token": 2, "expert_dim": 640},
        },
        1280,
    ),
    "compressed": (
        {
            **SMALL,
            "dim": 1152,
            "layers": 9,
            "heads": 9,
            "head_dim": 128,
            "latent": {"kv_rank": 192, "rope_dim": 64, "value_dim": 128, "q_rank": 384},
        },
        1024,
    ),
    "absolute": (
        {
            **SMALL,
            "dim": 1024,
            "layers": 17,
            "mlp": "plain",
            "mlp_dim": 4096,
            "activation": "gelu",
            "norm": "layer",
            "positions": "learned",
            "max_positions": 768,
        },
        768,
    ),
}
FOURTH: list[tuple[str, int, dict[str, Any], str, int]] = [
    ("stout", 7, EAGER, "adamw", 1),
    ("stout", 6, {**EAGER, "activations": "full"}, "adamw", 2),
    ("stout", 8, {**EAGER, "activations": "selective"}, "adamw", 1),
    ("keyed", 5, EAGER, "lion", 1),
    ("keyed", 6, {**EAGER, "activations": "full"}, "muon", 1),
    ("sparse", 9, EAGER, "adamw", 1),
    ("sparse", 7, {**EAGER, "activations": "full"}, "lion", 1),
    ("compressed", 6, EAGER, "adamw", 1),
    ("absolute", 10, EAGER, "adamw", 1),
    ("absolute", 7, {**EAGER, "activations": "selective"}, "adamw", 1),
    ("keyed", 3, {**EAGER, "offload": "optimizer"}, "adamw", 1),
    ("keyed", 7, {**COMPILED, "activations": "budget", "activation_budget": 0.7}, "adamw", 1),
    # Not blind: rows that still miss 15%, or whose clock was a loop of one kernel.
    ("fine experts", 7, {**EAGER, "activations": "full"}, "adamw", 1),
    ("latent", 8, EAGER, "adamw", 1),
    ("moe", 8, EAGER, "adamw", 1),
    ("grouped", 4, {**EAGER, "activations": "selective"}, "adamw", 1),
    ("broad", 4, {**EAGER, "offload": "optimizer"}, "adamw", 1),
    ("broad", 6, {**EAGER, "offload": "parameters", "activations": "full"}, "adamw", 1),
    ("square", 8, {**EAGER, "activations": "selective"}, "adamw8bit", 1),
]
# A fifth blind set: shapes that no row above has, then the rows that miss 15%, or nearly.
SHAPES |= {
    "middle": ({**SMALL, "vocab_size": 57344, "dim": 1408, "layers": 12, "heads": 11, "mlp_dim": 3840}, 1536),
    "paired": (
        {**SMALL, "vocab_size": 36864, "dim": 1664, "layers": 10, "heads": 13, "kv_heads": 1, "mlp_dim": 4608},
        1280,
    ),
    "expertise": (
        {
            **SMALL,
            "dim": 1024,
            "layers": 7,
            "heads": 8,
            "kv_heads": 2,
            "moe": {"experts": 16, "experts_per_token": 3, "expert_dim": 896, "shared_dim": 896},
        },
        1280,
    ),
    "squeezed": (
        {
            **SMALL,
            "dim": 1280,
            "layers": 9,
            "heads": 10,
            "head_dim": 96,
            "latent": {"kv_rank": 224, "rope_dim": 32, "value_dim": 96, "q_rank": 448},
        },
        1280,
    ),
}
FIFTH: list[tuple[str, int, dict[str, Any], str, int]] = [
    ("middle", 6, EAGER, "adamw", 1),
    ("middle", 9, {**EAGER, "activations": "full"}, "adamw", 1),
    ("paired", 8, EAGER, "lion", 2),
    ("paired", 7, {**EAGER, "activations": "selective"}, "adamw", 1),
    ("expertise", 8, EAGER, "adamw", 1),
    ("expertise", 8, {**EAGER, "activations": "full"}, "adamw", 1),
    ("squeezed", 7, EAGER, "adamw", 1),
    ("squeezed", 9, {**EAGER, "activations": "selective"}, "muon", 1),
    ("paired", 4, {**EAGER, "offload": "optimizer"}, "adamw", 1),
    ("middle", 10, COMPILED, "adamw", 1),
    ("paired", 12, {**COMPILED, "activations": "full"}, "adamw", 1),
    ("middle", 8, FP8, "adamw", 1),
    # Not blind.
    ("fine experts", 7, {**EAGER, "activations": "full"}, "adamw", 1),
    ("compressed", 6, EAGER, "adamw", 1),
    ("shared", 8, EAGER, "adamw", 1),
    ("learned", 9, {**EAGER, "activations": "full"}, "adamw", 2),
    ("broad", 4, {**EAGER, "offload": "optimizer"}, "adamw", 1),
    ("broad", 6, {**EAGER, "offload": "parameters", "activations": "full"}, "adamw", 1),
    ("square", 8, {**EAGER, "activations": "selective"}, "adamw8bit", 1),
]
CHOICE = ("pick", 48)
"""The shape and the sequences of a step whose first layouts are all measured."""
CENSUS = (
    ("heavy", EAGER, "adamw"),
    ("tall", EAGER, "adamw"),
    ("many experts", EAGER, "lion"),
    ("grouped", COMPILED, "adamw"),
)
"""Shapes and layouts whose largest fitting micro-batch is run, and the next that is predicted not to fit."""
GRIDS = {
    "known": KNOWN,
    "unseen": UNSEEN,
    "fresh": FRESH,
    "second": SECOND,
    "third": THIRD,
    "again": AGAIN,
    "fourth": FOURTH,
    "fifth": FIFTH,
}


def as_row(shape: str, sequences: int, layout: dict[str, Any], optimizer: str, accumulation: int) -> dict[str, Any]:
    """Return the settings of a row by name."""
    return {
        "shape": shape,
        "sequences": sequences,
        "layout": layout,
        "optimizer": optimizer,
        "accumulation": accumulation,
    }


def config_of_row(shape: str, *, tiny: bool = False) -> tuple[Any, int]:
    """Return the model config of a shape and the tokens of a sequence; `tiny` shrinks it to try a script on a CPU."""
    from piledriver.core.config import from_mapping
    from piledriver.models.config import ModelConfig
    from piledriver.models.presets import preset

    given, length = SHAPES[shape]
    if tiny:
        small = {"dim": 64, "layers": 2, "heads": 4, "kv_heads": 4, "mlp_dim": 128, "vocab_size": 256, "head_dim": 16}
        known = {} if isinstance(given, str) else {k: v for k, v in given.items() if k not in ("latent", "moe")}
        given, length = {**known, **small, "max_positions": 16}, 16
    return (preset(given) if isinstance(given, str) else from_mapping(ModelConfig, given, shape)), length
