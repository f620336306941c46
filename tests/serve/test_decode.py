"""Generated tokens equal those of the model without a cache, and depend on seed, row and position only."""

from __future__ import annotations

import pytest
import torch

from piledriver.core.errors import UsageError
from piledriver.models import ModelConfig, Transformer
from piledriver.serve import Sampling, generate


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(vocab_size=61, dim=32, layers=2, heads=4, max_positions=32))


def test_greedy_decoding_equals_the_forward_without_a_cache(model: Transformer) -> None:
    tokens = torch.randint(61, (2, 5))
    expected = tokens
    for _ in range(8):
        expected = torch.cat([expected, model(expected)[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(generate(model, tokens, 8, Sampling(temperature=0)), expected)


def test_a_sample_depends_on_the_seed_the_row_and_the_position_only(model: Transformer) -> None:
    prompt = torch.randint(61, (1, 5))
    alone = generate(model, prompt, 8, Sampling(seed=3))
    assert torch.equal(generate(model, prompt.repeat(3, 1), 8, Sampling(seed=3))[:1], alone)
    assert torch.equal(generate(model, prompt, 4, Sampling(seed=3)), alone[:, :9])
    assert not torch.equal(generate(model, prompt, 8, Sampling(seed=4)), alone)


def test_top_k_takes_the_most_likely_tokens_only(model: Transformer) -> None:
    prompt = torch.randint(61, (64, 5))
    allowed = model(prompt)[:, -1].topk(3).indices
    drawn = generate(model, prompt, 1, Sampling(top_k=3, temperature=5.0))[:, -1:]
    assert (drawn == allowed).any(-1).all()
    assert len(drawn.unique()) > 1


def test_more_tokens_than_positions_are_refused(model: Transformer) -> None:
    with pytest.raises(UsageError, match="at most 2 new tokens"):
        generate(model, torch.zeros(1, 30, dtype=torch.long), 3)
