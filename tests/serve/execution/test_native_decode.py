"""Decode steps in C are those of the trained module: in the engine, with every option that the C kernels cover."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piledriver.kernels.native.library import native_library
from piledriver.models import ModelConfig, Transformer
from piledriver.serve import Engine, SamplingParams
from piledriver.serve.execution import fused

SIZES: dict[str, Any] = {"vocab_size": 96, "dim": 48, "layers": 2, "mlp_dim": 40, "max_positions": 64}


@pytest.mark.skipif(native_library() is None, reason="needs a C compiler")
@pytest.mark.parametrize(
    "options",
    [
        {"heads": 3},
        {"heads": 3, "kv_heads": 1, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "sliding_window": 5},
        {"heads": 2, "head_dim": 32, "rope_fraction": 0.5, "full_attention_layers": (1,), "sliding_window": 4},
    ],
)
def test_answers_in_c_are_those_of_the_module(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**SIZES, **options)).requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    calls = []
    native = fused.native_decode
    monkeypatch.setattr(fused, "native_decode", lambda *given, **named: calls.append(1) or native(*given, **named))
    prompts = [[1, 2, 3], list(range(20)), [5]]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
    found = Engine(model, block_size=4).generate(prompts, params)
    assert len(calls) == 7
    expected = Engine(model, block_size=4, fused=False).generate(prompts, params)
    for one, other in zip(found, expected, strict=True):
        assert one.completions[0].token_ids == other.completions[0].token_ids
        logprobs = [[token.logprob for token in answer.completions[0].logprobs or ()] for answer in (one, other)]
        torch.testing.assert_close(*map(torch.tensor, logprobs), rtol=1e-4, atol=1e-4)
