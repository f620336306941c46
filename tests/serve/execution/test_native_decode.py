"""Decode steps in C are those of the trained module: in the engine, with every option that the C kernels cover."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from piledriver.kernels.native.library import native_library
from piledriver.models import ModelConfig, Transformer
from piledriver.models.codes import first_weight
from piledriver.models.config import MoEConfig
from piledriver.models.feed_forward.mlp import GatedMLP
from piledriver.models.interchange import save_folder
from piledriver.models.quantised import quantise_linears
from piledriver.serve import Engine, SamplingParams
from piledriver.serve.execution import fused
from piledriver.serve.offline import load_engine

SIZES: dict[str, Any] = {"vocab_size": 96, "dim": 48, "layers": 2, "mlp_dim": 40, "max_positions": 64}

pytestmark = pytest.mark.skipif(native_library() is None, reason="needs a C compiler")


def make(options: dict[str, Any]) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**SIZES, **options})).requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def check_answers(model: Transformer, monkeypatch: pytest.MonkeyPatch, *, steps_in_c: int) -> None:
    calls = []
    native = fused.native_decode
    monkeypatch.setattr(fused, "native_decode", lambda *given, **named: calls.append(1) or native(*given, **named))
    prompts = [[1, 2, 3], list(range(20)), [5]]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
    found = Engine(model, block_size=4).generate(prompts, params)
    assert len(calls) == steps_in_c
    expected = Engine(model, block_size=4, fused=False).generate(prompts, params)
    for one, other in zip(found, expected, strict=True):
        assert one.completions[0].token_ids == other.completions[0].token_ids
        logprobs = [[token.logprob for token in answer.completions[0].logprobs or ()] for answer in (one, other)]
        torch.testing.assert_close(*map(torch.tensor, logprobs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"heads": 3},
        {"heads": 3, "kv_heads": 1, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "sliding_window": 5},
        {"heads": 2, "head_dim": 32, "rope_fraction": 0.5, "full_attention_layers": (1,), "sliding_window": 4},
    ],
)
def test_answers_in_c_are_those_of_the_module(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check_answers(make(options), monkeypatch, steps_in_c=7)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_answers_from_codes_are_those_of_the_module(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make({"dim": 128, "mlp_dim": 128, "heads": 2, "kv_heads": 1})
    check_answers(quantise_linears(model, kind, head="int8"), monkeypatch, steps_in_c=7)


def test_a_quantised_folder_in_16_bits_is_served_in_fp32_on_a_cpu(tmp_path: Path) -> None:
    model, cpu = make({"heads": 3}).bfloat16(), torch.device("cpu")
    save_folder(model, tmp_path / "dense")
    save_folder(quantise_linears(model, "int8"), tmp_path / "small")
    assert first_weight(load_engine(tmp_path / "dense", device=cpu).model).dtype == torch.bfloat16
    assert first_weight(load_engine(tmp_path / "small", device=cpu, dtype=torch.bfloat16).model).dtype == torch.bfloat16
    small = load_engine(tmp_path / "small", device=cpu).model
    assert {tensor.dtype for tensor in small.state_dict().values()} == {torch.float32, torch.int8}


@pytest.mark.parametrize(
    "options",
    [
        {"heads": 3, "qk_norm": "head"},
        {"heads": 2, "head_dim": 24},
        {"heads": 3, "moe": MoEConfig(experts=4, dense_layers=(0,))},
    ],
)
def test_models_that_c_does_not_cover_run_elsewhere(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    check_answers(make(options), monkeypatch, steps_in_c=0)


@pytest.mark.parametrize("change", ["width", "rotary table"])
def test_blocks_that_differ_run_elsewhere(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make({"heads": 3})
    if change == "width":
        model.blocks["1"].mlp = GatedMLP(model.config, 24).requires_grad_(False)
        for parameter in model.blocks["1"].mlp.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    else:
        assert model.rotary is not None
        model.rotary.table = model.rotary.table.double()
    check_answers(model, monkeypatch, steps_in_c=0)
