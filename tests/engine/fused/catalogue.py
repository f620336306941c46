"""Tiny models of `transformers`, one for each architecture that people bring, and a batch for each.

python -m tests.engine.fused.catalogue              # what compiling and 50 fused steps do to every architecture
python -m tests.engine.fused.catalogue llama t5     # to some
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.interchange.cases import CASES

VOCABULARY = 96
Build = Callable[[], nn.Module]

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
_NO_DROPOUT: dict[str, Any] = {
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "attention_dropout": 0.0,
    "dropout": 0.0,
    "dropout_rate": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "activation_dropout": 0.0,
    "hidden_dropout": 0.0,
    "layerdrop": 0.0,
    "attention_probs_dropout": 0.0,
    "classifier_dropout": 0.0,
    "drop_path_rate": 0.0,
    "embedding_dropout": 0.0,
    "mlp_dropout": 0.0,
}
_T5: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_IMAGE: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_channels": 3}
_SIDES = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in (("layers", 2), ("ffn_dim", 48))}
_SIDES |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}

# Architecture to (class, further settings of its config). Settings that a config does not have are left out.
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied-bias": ("LlamaForCausalLM", {"tie_word_embeddings": True, "mlp_bias": True, "attention_bias": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 8}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3ForCausalLM", {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "phi": ("PhiForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": None}),
    "olmo": ("OlmoForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt-neox": ("GPTNeoXForCausalLM", {}),
    "gptj": ("GPTJForCausalLM", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}),
    "opt": ("OPTForCausalLM", {"word_embed_proj_dim": 32, "ffn_dim": 48}),
    "falcon": ("FalconForCausalLM", {}),
    "bloom": ("BloomForCausalLM", {"n_layer": 2, "n_head": 4}),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        {"sliding_window": None, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    "stablelm": ("StableLmForCausalLM", {}),
    "cohere": ("CohereForCausalLM", {"logit_scale": 0.25}),
    "granite": ("GraniteForCausalLM", {"logits_scaling": 8.0, "residual_multiplier": 0.5}),
    "glm4": ("Glm4ForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {**_EXPERTS, "sliding_window": None}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**_EXPERTS, "moe_intermediate_size": 16}),
    "olmoe": ("OlmoeForCausalLM", _EXPERTS),
    "gpt-oss": (
        "GptOssForCausalLM",
        {**_EXPERTS, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
FURTHER = (
    "gpt-neo",
    "bigcode-mqa",
    "qwen2-moe",
    "deepseek-v2",
    "deepseek-v3",
    "llama4",
    "ministral",
    "olmo3",
    "cohere2",
    "granite-moe",
    "granite-moe-shared",
    "glm",
    "glm4-moe",
    "nemotron",
    "exaone4",
    "arcee",
    "apertus",
)
"""The other families that we read, each by one config of `tests.models.interchange.cases`."""
CAUSAL |= {name: CASES[name] for name in FURTHER}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", {}),
    "roberta": ("RobertaForMaskedLM", {}),
    "xlm-roberta": ("XLMRobertaForMaskedLM", {}),
    "distilbert": ("DistilBertForMaskedLM", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}),
    "electra": ("ElectraForMaskedLM", {"embedding_size": 32}),
    "mpnet": ("MPNetForMaskedLM", {}),
    "deberta-v2": ("DebertaV2ForMaskedLM", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "modernbert": ("ModernBertForMaskedLM", {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}),
}
IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", _IMAGE),
    "dinov2": ("Dinov2ForImageClassification", _IMAGE),
    "swin": (
        "SwinForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2},
    ),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    **ENCODERS,
    **IMAGES,
    "t5": ("T5ForConditionalGeneration", _T5),
    "t5-gated": ("T5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "mt5": ("MT5ForConditionalGeneration", _T5),
    "bart": ("BartForConditionalGeneration", {"d_model": 32, "decoder_start_token_id": 2, **_SIDES}),
    "marian": ("MarianMTModel", {"d_model": 32, "decoder_start_token_id": 2, **_SIDES}),
    "pegasus": ("PegasusForConditionalGeneration", {"d_model": 32, "decoder_start_token_id": 2, **_SIDES}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            "d_model": 32,
            "num_mel_bins": 8,
            "max_source_positions": 8,
            "max_target_positions": 32,
            "decoder_start_token_id": 1,
            **_SIDES,
        },
    ),
}
ALL = {**CAUSAL, **OTHERS}


def build(name: str, **changes: Any) -> nn.Module:
    """Return a tiny random model in training mode."""
    import transformers

    transformers.logging.set_verbosity_error()
    class_name, settings = ALL[name]
    torch.manual_seed(0)
    if name in FURTHER:
        known = vars(transformers.AutoConfig.for_model(class_name))
        given = {**settings, **{key: value for key, value in _NO_DROPOUT.items() if key in known}, **changes}
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(class_name, **given)
        )
    else:
        kind: Any = getattr(transformers, class_name)
        model = kind(kind.config_class(**{**_known_settings(kind.config_class, settings), **settings, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def _known_settings(config_class: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the small sizes and dropouts that a config has, under names that `settings` do not give."""
    renamed = getattr(config_class, "attribute_map", {})
    known = set(vars(config_class())) | set(renamed)
    given = {key: value for key, value in {**_SMALL, **_NO_DROPOUT}.items() if key in known}
    return {key: value for key, value in given.items() if renamed.get(key) not in settings}


def batch(name: str, rows: int = 2, length: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Return arguments of a call with labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    if name in IMAGES:
        size = IMAGES[name][1]["image_size"]
        return {
            "pixel_values": torch.randn(rows, 3, size, size, generator=generator),
            "labels": torch.tensor([0, 1][:rows]),
        }
    labels = tokens.clone()
    labels[0, :3] = -100
    if name == "whisper":
        return {"input_features": torch.randn(rows, 8, 16, generator=generator), "labels": labels}
    cache = {} if name in ENCODERS else {"use_cache": False}
    return {"input_ids": tokens, "labels": labels, **cache}  # type: ignore[dict-item]


def graphs_of(name: str, lengths: tuple[int, ...], **layout: Any) -> list[int]:
    """Return how many graphs were compiled after a step of each length."""
    from piledriver.engine.apply import apply_compute
    from piledriver.engine.compile import compile_report
    from piledriver.engine.layout import Layout
    from piledriver.engine.mesh import make_mesh
    from piledriver.engine.options import EngineOptions

    model = build(name)
    mesh = make_mesh(Layout(fuse=True, compile=True, **layout), "cpu")
    apply_compute(model, mesh, EngineOptions(compile={"backend": "eager"}))
    found = []
    for length in lengths:
        model(**batch(name, length=length)).loss.backward()
        found.append(compile_report().graphs)
    return found


def losses_of(
    name: str, steps: int, device: str = "cpu", rows: int = 2, length: int = 16, **layout: Any
) -> list[float]:
    """Return the losses of some steps of AdamW."""
    from piledriver.engine.apply import apply_compute
    from piledriver.engine.layout import Layout
    from piledriver.engine.mesh import make_mesh
    from piledriver.engine.options import EngineOptions

    model = build(name).to(device)
    apply_compute(model, make_mesh(Layout(**layout), device), EngineOptions())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        given = batch(name, rows, length, seed=step % 4).items()
        loss = model(**{key: one.to(device) if isinstance(one, Tensor) else one for key, one in given}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    """Print for each architecture: graphs after steps of five lengths, why, and how far 50 fused losses are off."""
    import sys

    from piledriver.engine.compile import compile_report, reset_compiler

    for name in sys.argv[1:] or ALL:
        reset_compiler()
        try:
            graphs, report = graphs_of(name, (16, 16, 24, 32, 20), precision="bf16"), compile_report()
            fused, plain = (losses_of(name, 50, precision="fp32", fuse=fuse) for fuse in (True, False))
            apart = max(abs(a - b) / abs(b) for a, b in zip(fused, plain, strict=True))
            print(name, graphs, report, f"losses off by {apart:.1e}, {plain[0]:.2f} to {plain[-1]:.2f}", flush=True)
        except Exception as error:  # the others are worth knowing
            print(name, f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
