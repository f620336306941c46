"""Presets are the published shapes: the published counts of parameters prove it."""

from __future__ import annotations

import pytest
import torch

from piledriver.core.errors import UnknownNameError
from piledriver.models import Transformer
from piledriver.models.model_size import active_parameter_count, cache_bytes_per_token, flops_per_token, parameter_count
from piledriver.models.presets import learning_rate, preset, preset_names

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "pythia-70m": 70_426_624,
    "pythia-1b": 1_011_781_632,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-0.5b": 494_032_768,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "olmo-1b": 1_176_764_416,
    "olmo2-7b": 7_298_617_344,
}


@pytest.mark.parametrize("name", preset_names())
def test_count_is_exact(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(preset(name))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert parameter_count(preset(name)) == count
    assert PUBLISHED.get(name, count) == count


def test_flops_are_those_of_the_counter() -> None:
    """The formula against torch's own count of the operations of a forward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    for name in ("tiny", "small", "pythia-14m"):
        config, length = preset(name), 128
        with torch.device("meta"):
            model = Transformer(config).to(torch.bfloat16)
        tokens = torch.zeros(1, length, dtype=torch.long, device="meta")
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(tokens, tokens)
        # It counts attention as if nothing were masked, and norms and biases not at all.
        attention = 2 * config.layers * config.heads * config.head_dim * length
        ours = flops_per_token(config, length, training=False) + attention
        assert counter.get_total_flops() / length == pytest.approx(ours, rel=0.01)


def test_benchmark_shape_agrees_with_its_stated_flops() -> None:
    config = preset("gpt2-124m")
    assert flops_per_token(config, 1024) == 6 * parameter_count(config) + 6 * 12 * 768 * 1024


def test_mixture_counts_what_a_token_meets() -> None:
    assert active_parameter_count(preset("mixtral-8x7b")) == 12_879_925_248
    assert cache_bytes_per_token(preset("llama-3-8b")) == 2 * 32 * 8 * 128 * 2


def test_unknown_preset_is_named() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'llama-3-8b'"):
        preset("llama-3-8bb")


def test_every_preset_has_a_learning_rate_and_small_ones_a_large_one() -> None:
    rates = {name: learning_rate(name) for name in preset_names()}
    assert all(5e-5 <= rate <= 4e-3 for rate in rates.values())
    assert rates["1m"] == learning_rate(preset("1m")) == 0.0029
    assert (rates["pythia-1.4b"], rates["llama-2-70b"]) == (2e-4, 1.5e-4)
    assert [round(parameter_count(preset(name)) / 1e6, 1) for name in ("1m", "10m")] == [1.1, 10.0]
