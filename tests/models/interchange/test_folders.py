"""Folders of transformers: shards, dtypes, nulls, token ids, and what is damaged or not supported."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors_torch
import torch

from piledriver.core.errors import ConfigError, CorruptFileError, StorageError, UsageError
from piledriver.models import ModelConfig, Transformer
from piledriver.models.interchange import (
    InterchangeError,
    allocate_folder,
    load_folder,
    load_weights,
    read_config,
    save_folder,
    write_config,
)
from piledriver.models.interchange.families import UnknownFamilyError
from piledriver.models.presets import preset, preset_names
from tests.models.interchange import cases
from tests.patience import HANG_S

transformers = pytest.importorskip("transformers")

SMALL = {key: value for key, value in cases.SMALL.items() if not key.endswith("token_id")}


def their_model(case: str) -> Any:
    model_type, settings = cases.CASES[case]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **settings))
    with torch.no_grad():  # their initial norms and biases are constants, which would hide a mix-up
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out = model(tokens)
    return out if isinstance(out, torch.Tensor) else out.logits


@pytest.mark.parametrize("case", ["llama3-gqa", "mixtral"])
def test_shards_hold_the_same_tensors(case: str, tmp_path: Path) -> None:
    theirs = their_model(case)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs/model.safetensors.index.json").exists()
    ours = load_folder(tmp_path / "theirs")
    save_folder(ours, tmp_path / "ours", max_shard_bytes=20_000)
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 2
    again = load_folder(tmp_path / "ours")
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
    save_folder(again, tmp_path / "ours")
    assert [path.name for path in (tmp_path / "ours").glob("model*")] == ["model.safetensors"]


def test_bfloat16_is_kept(tmp_path: Path) -> None:
    model = Transformer(preset("tiny", layers=1, vocab_size=64))
    save_folder(model, tmp_path, dtype=torch.bfloat16, extra={"eos_token_id": 5})
    assert load_folder(tmp_path).embedding.weight.dtype == torch.bfloat16
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert theirs.dtype == torch.bfloat16
    assert theirs.config.eos_token_id == 5


def test_memory_may_be_allocated_before_weights_are_read(tmp_path: Path) -> None:
    save_folder(Transformer(preset("tiny-moe", layers=2, vocab_size=64)), tmp_path, extra={"eos_token_id": 5})
    whole, later = load_folder(tmp_path), allocate_folder(tmp_path)
    load_weights(later, tmp_path)
    assert later.generation == whole.generation == {"bos_token_id": None, "eos_token_id": 5, "pad_token_id": None}
    for (name, mine), (other, theirs) in zip(later.named_parameters(), whole.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(mine, theirs)


def test_loading_does_not_import_the_compiler(tmp_path: Path) -> None:
    save_folder(Transformer(preset("tiny", layers=1, vocab_size=64)), tmp_path, dtype=torch.bfloat16)
    script = """
import sys, torch
before = set(sys.modules)
import piledriver.serve.placement
from piledriver.models.interchange import load_folder
load_folder(sys.argv[1], dtype=torch.float32)
assert not {"sympy", "torch._dynamo", "torch._inductor"} & (set(sys.modules) - before)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=HANG_S)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_may_come_one_by_one_in_any_order(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Transformer(preset("tiny-moe", layers=2, vocab_size=64))
    stream = reversed(list(model.named_parameters()))
    with torch.device("meta"):
        empty = Transformer(model.config)
    save_folder(empty, tmp_path, dtype=dtype, weights=stream)
    read = safetensors_torch.load_file(tmp_path / "model.safetensors")
    safetensors_torch.save_file(read, tmp_path / "expected", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "expected").read_bytes(), "as their library"
    for name, parameter in load_folder(tmp_path).named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).to(dtype)), name


def test_a_save_that_fails_takes_the_weights_to_the_end_and_leaves_nothing(tmp_path: Path) -> None:
    """Other processes take part in every tensor: one that stopped early would leave them waiting."""
    model = Transformer(preset("tiny", layers=2, vocab_size=64))
    (tmp_path / "model.safetensors").mkdir()
    taken = []
    weights = ((taken.append(name), (name, weight))[1] for name, weight in model.named_parameters())
    with pytest.raises(StorageError, match=r"cannot write .*model\.safetensors"):
        save_folder(model, tmp_path, weights=weights)
    some = list(model.named_parameters())[:-1]
    with pytest.raises(InterchangeError, match="no weights came for"):
        save_folder(model, tmp_path / "other", weights=some)
    assert len(taken) == len(list(model.parameters()))
    assert [path.name for path in tmp_path.rglob("*")] == ["model.safetensors", "other"]


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_family(name: str) -> None:
    config = preset(name)
    assert read_config(json.loads(json.dumps(write_config(config)))) == config


def test_what_no_family_says_is_refused() -> None:
    with pytest.raises(InterchangeError, match="attention_softcap"):
        write_config(preset("tiny", attention_softcap=30.0))
    with pytest.raises(InterchangeError, match="mup_base_dim"):
        write_config(dataclasses.replace(preset("tiny"), mup_base_dim=64), "llama")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before: False"),
    ("opt", {"word_embed_proj_dim": 16}, "word_embed_proj_dim: 16"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm: True"),
    ("falcon", {"alibi": True}, "alibi: True"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: True"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha: 1.0"),
    ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config: mxfp4"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: softmax"),
    ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window: True"),
    ("llama", {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "rope_type: proportional"),
    (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope_parameters.sliding_attention.rope_type: linear",
    ),
    ("qwen3_next", {}, "model_type 'qwen3_next'"),
    ("mamba2", {}, "model_type 'mamba2'"),
    ("jamba", {}, "model_type 'jamba'"),
]


@pytest.mark.parametrize(("model_type", "settings", "field"), REFUSED)
def test_what_is_not_supported_is_refused_by_its_field(model_type: str, settings: dict[str, Any], field: str) -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    with pytest.raises((InterchangeError, UnknownFamilyError)) as caught:
        read_config({"model_type": model_type, **SMALL, **sizes, **settings})
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_part_of_each_head_is_turned_only_where_transformers_does_it(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(InterchangeError, match=r"llama with partial_rotary_factor 0.5"):
        read_config({"model_type": "llama", **SMALL, "rope_parameters": rope})
    with pytest.raises(InterchangeError, match=r"partial_rotary_factor 0.5|rope_fraction"):
        write_config(preset("tiny", rope_fraction=0.5), "llama")
    assert write_config(preset("tiny", rope_fraction=0.5))["model_type"] == "phi3", "the first family that does"
    assert read_config({"model_type": "gpt_neox", **SMALL, "rope_parameters": rope}).rope_fraction == 0.5


def test_old_spellings_of_rotary_settings() -> None:
    old = {
        **SMALL,
        "rope_theta": 5e5,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    config = read_config({"model_type": "llama", **old})
    assert config.rope_theta == 5e5
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.factor) == ("linear", 2.0)
    neox = read_config({"model_type": "gpt_neox", **SMALL, "rotary_pct": 0.5, "rotary_emb_base": 777})
    assert (neox.rope_fraction, neox.rope_theta) == (0.5, 777)


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    save_folder(Transformer(preset("tiny", layers=2, vocab_size=64)), tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    for change, message in [
        ({"num_hidden_layers": 3}, "no tensor model.layers.2"),
        ({"num_hidden_layers": 1}, "not in a llama model of its config, first model.layers.1"),
        ({"vocab_size": 65}, r"\(64, 128\), but config.json implies \(65, 128\)"),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**settings, **change}))
        with pytest.raises(InterchangeError, match=message):
            load_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**settings, "model_type": "lama"}))
    with pytest.raises(UnknownFamilyError, match="use one of apertus, "):
        load_folder(tmp_path)
    with pytest.raises(InterchangeError, match="another shape"):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        load_weights(Transformer(ModelConfig(vocab_size=8, dim=8, layers=1, heads=1)), tmp_path)
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(CorruptFileError, match=r"model.safetensors is not a complete safetensors file"):
        load_folder(tmp_path)
    index = {"weight_map": {"model.embed_tokens.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptFileError, match=r"model-00002-of-00002.safetensors is missing"):
        load_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CorruptFileError, match=r"config.json is damaged"):
        load_folder(tmp_path)


NULLABLE = [
    ("llama", {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None}),
    ("mistral", {"sliding_window": None, "head_dim": None}),
    ("mistral", {"sliding_window": 8192, "num_key_value_heads": 2}),
    ("mistral", {}),
    ("mixtral", {"sliding_window": None, "head_dim": None}),
    ("mixtral", {"sliding_window": 8192}),
    ("qwen2", {"num_key_value_heads": None, "use_sliding_window": True, "sliding_window": None}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8192, "max_window_layers": 1}),
    ("qwen3", {"num_key_value_heads": None, "use_sliding_window": False, "sliding_window": 8192}),
    ("olmo", {"num_key_value_heads": None, "clip_qkv": None}),
    ("olmo2", {"num_key_value_heads": None}),
    ("gpt_neox", {"rope_scaling": None}),
]


@pytest.mark.parametrize(("model_type", "settings"), NULLABLE)
def test_a_null_is_a_value_and_only_absent_keys_have_defaults(model_type: str, settings: dict[str, Any]) -> None:
    written = {"model_type": model_type, **SMALL, "max_position_embeddings": 32768, **settings}
    if model_type in ("mistral", "mixtral", "qwen2"):
        written.setdefault("num_key_value_heads", 2)
    ours, theirs = read_config(written), transformers.AutoConfig.for_model(**written)
    assert ours.kv_heads == getattr(theirs, "num_key_value_heads", ours.heads)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * ours.layers
    window = getattr(theirs, "sliding_window", None)
    expected = [window if kind == "sliding_attention" else None for kind in types]
    assert [ours.window_of(layer) for layer in range(ours.layers)] == expected
    again = write_config(ours, model_type)
    assert read_config(again) == ours
    assert getattr(transformers.AutoConfig.for_model(**again), "sliding_window", None) == (
        window if any(expected) else None
    )


def test_a_null_inner_width_of_gpt2_is_four_times_the_width() -> None:
    assert read_config({"model_type": "gpt2", **cases.GPT, "n_inner": None}).mlp_dim == 4 * 32


def test_errors_of_a_config_name_its_own_keys(tmp_path: Path) -> None:
    with pytest.raises(InterchangeError, match="no 'hidden_size'"):
        read_config({"model_type": "llama", **{key: value for key, value in SMALL.items() if key != "hidden_size"}})
    with pytest.raises(ConfigError, match="'rms_norm_eps' is None"):
        read_config({"model_type": "llama", **SMALL, "rms_norm_eps": None})
    with pytest.raises(UnknownFamilyError, match=r"use one of apertus, .*load it with transformers"):
        read_config({"model_type": "mamba"})
    with pytest.raises(UsageError, match="has no model_type"):
        read_config({})


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    theirs = their_model("llama-mha")
    theirs.save_pretrained(tmp_path)
    tensors = safetensors_torch.load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] = torch.zeros(31, 32)
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InterchangeError, match=r"q_proj.weight is \(31, 32\), but config.json implies \(32, 32\)"):
        load_folder(tmp_path)


@pytest.mark.parametrize("given", [{"bos_token_id": 5, "eos_token_id": [6, 7]}, {}])
def test_token_ids_survive_loading_and_saving(given: dict[str, Any], tmp_path: Path) -> None:
    theirs = their_model("llama-mha")
    theirs.save_pretrained(tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    config = {key: value for key, value in config.items() if key not in ids} | given
    (tmp_path / "theirs/config.json").write_text(json.dumps(config))
    (tmp_path / "theirs/generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "do_sample": True, **given})
    )
    save_folder(load_folder(tmp_path / "theirs"), tmp_path / "ours", model_type="llama")
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    after = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for name in ids:
        assert getattr(after.config, name) == getattr(before.config, name)
        assert getattr(after.generation_config, name) in (
            getattr(before.generation_config, name),
            getattr(before.config, name),
        )
    assert after.generation_config.temperature == 0.6


def test_a_model_without_token_ids_gets_none_of_llamas(tmp_path: Path) -> None:
    model = Transformer(ModelConfig(vocab_size=67, dim=32, layers=1, heads=4))
    save_folder(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (theirs.config.eos_token_id, theirs.config.bos_token_id) == (None, None)
    assert (theirs.generation_config.eos_token_id, theirs.generation_config.bos_token_id) == (None, None)
