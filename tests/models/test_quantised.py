"""Quantised layers in a model: near the original's logits, served by the engine, unchanged by casts."""

from __future__ import annotations

import copy

import pytest
import torch

from piledriver.kernels.linear import WeightKind
from piledriver.models import ModelConfig, Transformer
from piledriver.models.codes import QuantisedCodes
from piledriver.models.quantised import QuantisedLinear, quantise_linears


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.02), ("fp8", 0.06), ("int4", 0.25)])
def test_a_quantised_model_has_nearly_the_same_logits(kind: WeightKind, most: float) -> None:
    config = ModelConfig(vocab_size=61, dim=128, layers=2, heads=4, mlp_dim=256, max_positions=64, qkv_bias=True)
    model = Transformer(config).requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.08) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    small = quantise_linears(copy.deepcopy(model), kind, head="int8")
    tokens = torch.arange(20)[None]
    found, expected = small(tokens), model(tokens)
    assert (found - expected).norm() / expected.norm() < most
    layers = [module for module in small.modules() if isinstance(module, QuantisedLinear)]
    assert len(layers) == 8
    assert sum(layer.weight.numel() for layer in layers if layer.kind == "int4") * 2 == (
        sum(layer.in_features * layer.out_features for layer in layers) if kind == "int4" else 0
    )


def test_a_cast_leaves_quantised_values_alone() -> None:
    layer = QuantisedLinear.from_linear(torch.nn.Linear(128, 16), "fp8")
    before = layer.weight.float()
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.float8_e4m3fn
    assert torch.equal(layer.weight.float(), before)
    assert layer(torch.randn(2, 128, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert layer.scales.dtype == torch.float32
    half = QuantisedLinear.from_linear(torch.nn.Linear(128, 16, dtype=torch.bfloat16), "int8")
    assert half.half().scales.dtype == torch.bfloat16
    assert half.float().scales.dtype == torch.float32  # exact


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantised_head_takes_the_place_of_the_weight(tied: bool) -> None:
    config = ModelConfig(vocab_size=61, dim=128, layers=1, heads=4, mlp_dim=256, max_positions=64, tied=tied)
    model = Transformer(config).requires_grad_(False)
    tokens = torch.arange(20)[None]
    before, table = model(tokens), model.output_weight()
    quantise_linears(model, "int8", head="int8")
    layer = model.output_layer()
    assert isinstance(layer, QuantisedCodes)
    assert isinstance(model.embedding, QuantisedCodes) == tied
    torch.testing.assert_close(model.output_weight(), table, rtol=0, atol=float(table.abs().max()) / 250)
    assert float((model(tokens) - before).norm() / before.norm()) < 0.02
    model.to(torch.bfloat16)
    # An embedding gives its output in the dtype of its scales; a linear layer, in that of its input.
    assert (layer.weight.dtype, layer.scales.dtype) == (torch.int8, torch.bfloat16 if tied else torch.float32)
    assert model(tokens).dtype == torch.bfloat16
    model.to("meta")
    assert layer.weight.is_meta
    assert layer.scales.is_meta
