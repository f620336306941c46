"""Blocks of every kind are served: latent attention, sinks, experts with biases, norms on both sides, biased heads."""

from __future__ import annotations

import pytest
import torch

from piledriver.core.errors import UsageError
from piledriver.models import ModelConfig, RopeScaling, Transformer
from piledriver.serve import Engine, SamplingParams
from tests.models.shapes import BASE, SHAPES

PROMPTS = [[1, 2, 3], list(range(20))]


@pytest.mark.parametrize("name", ["latent", "sinks", "shared-norm", "both-norms"])
def test_served_tokens_are_those_of_the_forward_without_a_cache(name: str) -> None:
    model = Transformer(SHAPES[name]).requires_grad_(False)
    expected = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        for _ in range(5):
            tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
        expected.append(tokens[0, len(prompt) :].tolist())
    for settings in ({"token_budget": 9}, {"deterministic": True}):
        outputs = Engine(model, **settings).generate(PROMPTS, SamplingParams(max_tokens=5, temperature=0))
        assert [output.completions[0].token_ids for output in outputs] == expected, settings


def test_what_depends_on_other_tokens_of_a_step_is_rejected() -> None:
    with pytest.raises(UsageError, match="chunked attention"):
        Engine(Transformer(SHAPES["chunked"]))
    scaling = RopeScaling(kind="dynamic", factor=4.0, original_max_positions=16)
    with pytest.raises(UsageError, match=r"beyond 16 tokens.* limit sequences to 16 tokens"):
        Engine(Transformer(ModelConfig(**BASE, rope_scaling=scaling)))
