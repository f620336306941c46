"""Structured pruning: parts that compute nothing go without a trace, and the result is an ordinary smaller model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from piledriver import compress
from piledriver.compress.calibration import LayerStatistics
from piledriver.compress.structured import KeptParts, SmallerShape, cut
from piledriver.compress.structured.prune_shape import _remove_inputs
from piledriver.core.errors import UsageError
from piledriver.models import ModelConfig, MoEConfig, Transformer
from piledriver.models.config import LatentAttentionConfig
from piledriver.models.interchange import load_folder, save_folder
from piledriver.models.layers import Linear
from piledriver.models.model_size import parameter_count

TOKENS = torch.randint(61, (8, 24), generator=torch.Generator().manual_seed(1))
SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "dim": 64,
    "layers": 4,
    "heads": 8,
    "kv_heads": 4,
    "mlp_dim": 96,
    "max_positions": 64,
}


def make(**changes: Any) -> Transformer:
    return Transformer(ModelConfig(**{**SHAPE, **changes})).requires_grad_(False)


def silence(model: Transformer, groups: dict[int, list[int]], neurons: dict[int, list[int]]) -> None:
    """Set what is not kept to zero: the output columns of groups, and of neurons."""
    for name, block in model.blocks.items():
        out, down = block.attention.out.weight, block.mlp.down.weight
        width = out.shape[1] // model.config.kv_heads
        for group in set(range(model.config.kv_heads)) - set(groups[int(name)]):
            out[:, group * width : (group + 1) * width] = 0.0
        gone = sorted(set(range(down.shape[1])) - set(neurons[int(name)]))
        down[:, gone] = 0.0


def assert_same_function(small: Transformer, model: Transformer) -> None:
    """Compare logits in double precision: a matrix library may add up fewer terms in another order."""
    torch.testing.assert_close(small.double()(TOKENS), model.double()(TOKENS), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mlp": "plain", "activation": "gelu", "mlp_bias": True, "qkv_bias": True, "norm": "layer", "norm_bias": True},
        {"qk_norm": "per_head", "attention_sinks": True, "tied": False},
        {"kv_heads": 8, "latent": LatentAttentionConfig(kv_rank=16, rope_dim=8, value_dim=8), "head_dim": 16},
    ],
    ids=["gqa", "plain", "norms", "latent"],
)
def test_what_is_exactly_zero_is_removed_and_logits_stay_equal(changes: dict[str, Any]) -> None:
    model = make(**changes)
    groups = {layer: [0, 1, 3] if layer % 2 else [1, 2, 3] for layer in range(4)}
    luck = torch.Generator().manual_seed(3)
    neurons = {layer: sorted(torch.randperm(96, generator=luck)[:56].tolist()) for layer in range(4)}
    silence(model, groups, neurons)
    model.blocks["2"].attention.out.weight.zero_()
    model.blocks["2"].mlp.down.weight.zero_()
    for bias in (model.blocks["2"].attention.out.bias, model.blocks["2"].mlp.down.bias):
        if bias is not None:
            bias.zero_()
    kept = KeptParts(
        layers=[0, 1, 3],
        groups={layer: torch.tensor(chosen) for layer, chosen in groups.items()},
        neurons={layer: torch.tensor(chosen) for layer, chosen in neurons.items()},
    )
    small = cut(model, kept)
    assert (small.config.layers, small.config.kv_heads, small.config.mlp_dim) == (3, 3, 56)
    assert sum(p.numel() for p in small.parameters()) == parameter_count(small.config) < parameter_count(model.config)
    assert_same_function(small, model)


def test_importance_finds_what_is_zero_and_leaves_the_rest() -> None:
    model = make()
    groups = {layer: [0, 2, 3] for layer in range(4)}
    neurons = {layer: list(range(64)) for layer in range(4)}
    silence(model, groups, neurons)
    for block in model.blocks.values():
        rows = torch.unflatten(block.attention.qkv.weight, 0, (4, -1))
        rows[1] = 0.0
        block.mlp.gate_up.weight[128:] = 0.0
    model.blocks["3"].attention.out.weight.zero_()
    model.blocks["3"].mlp.down.weight.zero_()
    small = compress.prune(model, SmallerShape(layers=3, kv_heads=3, mlp_dim=64), data=TOKENS)
    assert_same_function(small, model)
    assert small.compression[-1]["kept_layers"] == [0, 1, 2]


def test_channels_that_are_zero_are_removed_and_norms_rescaled() -> None:
    model = make(norm_eps=1e-12)
    gone = torch.tensor([3, 17, 40, 41])
    for name, parameter in model.named_parameters():
        if name.endswith(("embedding.weight", "qkv.weight", "gate_up.weight")):
            parameter[:, gone] = 0.0
        if name.endswith(("out.weight", "down.weight")):
            parameter[gone] = 0.0
    small = compress.prune(model, SmallerShape(dim=60), data=TOKENS)
    torch.testing.assert_close(small(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-5)


def test_experts_that_are_never_chosen_are_removed() -> None:
    model = make(moe=MoEConfig(experts=4, experts_per_token=2, expert_dim=32, scores="sigmoid", correction_bias=True))
    for block in model.blocks.values():
        block.mlp.router.correction_bias.copy_(torch.tensor([0.0, -9.0, 0.0, 0.0]))
    small = compress.prune(model, SmallerShape(experts=3), data=TOKENS)
    assert small.config.moe is not None
    assert small.config.moe.experts == 3
    # A router with fewer outputs may round differently.
    torch.testing.assert_close(small(TOKENS), model(TOKENS), rtol=1e-5, atol=1e-6)


def test_layers_keep_their_windows_and_dense_blocks() -> None:
    model = make(sliding_window=4, full_attention_layers=(1, 3), no_rope_layers=(3,))
    small = cut(model, KeptParts(layers=[0, 2, 3]))
    assert (small.config.full_attention_layers, small.config.no_rope_layers) == ((2,), (2,))
    for new, old in enumerate([0, 2, 3]):
        assert small.blocks[str(new)].window == model.blocks[str(old)].window
        assert small.blocks[str(new)].rope == model.blocks[str(old)].rope


@pytest.mark.parametrize("score", ["influence", "loss"])
def test_the_layer_that_does_least_goes(score: Any) -> None:
    model = make()
    for parameter in (model.blocks["1"].attention.out.weight, model.blocks["1"].mlp.down.weight):
        parameter.mul_(1e-4)
    for name in ("0", "2", "3"):
        model.blocks[name].mlp.down.weight.mul_(10)
    small = compress.prune(model, SmallerShape(layers=3), data=TOKENS, layer_score=score)
    if score == "influence":
        assert small.compression[-1]["kept_layers"] == [0, 2, 3]
    assert len(small.compression[-1]["layer_scores"]) == 4


def test_correction_is_least_squares() -> None:
    luck = torch.Generator().manual_seed(0)
    x = torch.randn(300, 12, generator=luck, dtype=torch.float64) @ torch.randn(12, 12, generator=luck).double()
    layer = Linear(12, 5, bias=False).requires_grad_(False)
    layer.weight.copy_(torch.randn(5, 12, generator=luck))
    dense, kept = layer.weight.clone().double(), torch.tensor([0, 2, 3, 5, 8, 9, 11])
    statistics = LayerStatistics(12, torch.device("cpu"))
    statistics.add(x)
    error = _remove_inputs(layer, statistics.hessian, kept, True, 1e-9)
    best = torch.linalg.lstsq(x[:, kept], x @ dense.t()).solution
    torch.testing.assert_close(layer.weight[:, kept].double(), best.t(), rtol=1e-3, atol=1e-3)
    residual = (x[:, kept] @ best - x @ dense.t()).square().sum() / (x @ dense.t()).square().sum()
    assert error == pytest.approx(float(residual), rel=1e-2)


def test_the_result_saves_and_loads(tmp_path: Path) -> None:
    small = compress.prune(make(), SmallerShape(layers=3, kv_heads=2, mlp_dim=64, dim=48), data=TOKENS)
    save_folder(small, tmp_path / "small")
    again = load_folder(tmp_path / "small")
    assert again.config == small.config
    assert torch.equal(again(TOKENS), small(TOKENS))
    assert again.compression[-1]["shape"] == {"layers": 3, "dim": 48, "kv_heads": 2, "mlp_dim": 64}


@pytest.mark.parametrize(
    ("shape", "changes", "said"),
    [
        (SmallerShape(), {}, "no size"),
        (SmallerShape(mlp_dim=200), {}, "the model has 96"),
        (SmallerShape(experts=2), {}, "the model has none"),
        (SmallerShape(kv_heads=2), {"positions": "alibi"}, "ALiBi"),
        (SmallerShape(kv_heads=2), {"qk_norm": "full"}, "qk_norm full"),
        (SmallerShape(dim=32), {"mup_base_dim": 32}, "muP"),
    ],
)
def test_shapes_that_cannot_be_are_refused(shape: SmallerShape, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        compress.prune(make(**changes), shape, data=TOKENS)
