"""Quantisation: methods against brute force, results as ordinary models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from piledriver import compress
from piledriver.compress.awq import STEPS, channel_scale, search_clip, search_scale
from piledriver.compress.calibration import BlockWalk, Calibration, LayerStatistics
from piledriver.compress.gptq import gptq
from piledriver.compress.scaling import apply_scale, input_scales
from piledriver.compress.scheme import NAMES, Scheme
from piledriver.compress.smoothquant import smoothing_scale
from piledriver.core.errors import UsageError
from piledriver.kernels.linear import GROUPS, WeightGrid, dequantise_weight, quantise_weight, weight_codes, weight_grid
from piledriver.models import ModelConfig, MoEConfig, Transformer
from piledriver.models.config import LatentAttentionConfig
from piledriver.models.interchange import load_folder, save_folder
from piledriver.models.layers import Linear
from piledriver.models.quantised import DynamicQuantisedLinear, QuantisedExperts, QuantisedLinear
from piledriver.models.torch_private import has_forward_hooks
from piledriver.serve import Engine, SamplingParams

SHAPE: dict[str, Any] = {"vocab_size": 61, "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_dim": 96}
TOKENS = torch.randint(61, (8, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(**SHAPE, max_positions=64, init_std=0.08)).requires_grad_(False)


def inputs(columns: int, seed: int = 0) -> Tensor:
    make = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=make)
    return torch.randn(200, columns, generator=make) @ mix * torch.linspace(0.1, 3, columns)


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_survive_packing_and_rounding_is_to_the_nearest(kind: Any, group: int, symmetric: bool) -> None:
    weight = torch.randn(5, 256, generator=torch.Generator().manual_seed(2)) + 0.3
    grid = weight_grid(weight, kind, group=group, symmetric=symmetric)
    codes = grid.codes(weight)
    packed = grid.pack(codes)
    assert torch.equal(weight_codes(packed), codes)
    assert packed.shape == (5, 256)
    error = (dequantise_weight(packed, torch.float32) - weight).abs()
    for shift in (-1, 1):
        other = (codes + shift).clamp(0, 15) if kind == "int4" else (codes + shift).clamp(-127, 127)
        if kind != "fp8":
            assert bool((error <= (grid.values(other) - weight).abs() + 1e-6).all())
    # What is on the grid stays as it is.
    assert torch.equal(grid.codes(grid.values(codes)), codes)


def brute_force_gptq(weight: Tensor, hessian: Tensor, scheme: Scheme, order: list[int]) -> Tensor:
    """Invert the Hessian of the columns that are left anew at each step, in fp64."""
    grid = weight_grid(weight, scheme.weights, group=scheme.group, symmetric=scheme.symmetric)
    wide = hessian.double().clone()
    wide += 0.01 * wide.diagonal().mean() * torch.eye(len(wide), dtype=torch.float64)
    work, out = weight.double().clone(), torch.zeros_like(weight)
    for step, column in enumerate(order):
        left = order[step:]
        inverse = torch.linalg.inv(wide[left][:, left])
        group = column // (weight.shape[1] // grid.scales.shape[1])
        one = grid.columns(group, group + 1)
        out[:, column] = one.values(one.codes(work[:, column : column + 1].float()))[:, 0]
        error = (work[:, column] - out[:, column].double()) / inverse[0, 0]
        work[:, left] -= error[:, None] * inverse[0]
    return out


@pytest.mark.parametrize("name", ["w4a16-g32", "w4a16-g32-asym", "w8a16", "w8a16-fp8"])
@pytest.mark.parametrize("activation_order", [True, False])
def test_gptq_is_the_brute_force(name: str, activation_order: bool) -> None:
    x, weight, scheme = inputs(160), torch.randn(7, 160, generator=torch.Generator().manual_seed(3)), Scheme.named(name)
    hessian = x.t() @ x / len(x)
    order = hessian.diagonal().argsort(descending=True, stable=True).tolist() if activation_order else list(range(160))
    found = dequantise_weight(gptq(weight, hessian, scheme, activation_order=activation_order), torch.float32)
    expected = brute_force_gptq(weight, hessian, scheme, order)
    # fp32 and fp64 may round a tie differently, which all later columns of that row then follow.
    rows = ((found - expected).abs().amax(dim=1) <= 1e-5).float().mean()
    assert rows >= 6 / 7
    nearest = dequantise_weight(
        quantise_weight(weight, scheme.weights, group=scheme.group, symmetric=scheme.symmetric), torch.float32
    )
    assert (x @ (found - weight).t()).square().sum() < (x @ (nearest - weight).t()).square().sum()


def test_gptq_without_static_groups_makes_scales_on_the_way() -> None:
    x, weight = inputs(64), torch.randn(4, 64, generator=torch.Generator().manual_seed(5))
    hessian = x.t() @ x
    static = gptq(weight, hessian, Scheme.named("w4a16-g32"), activation_order=False)
    moving = gptq(weight, hessian, Scheme.named("w4a16-g32"), activation_order=False, static_groups=False)
    assert torch.equal(static.scales[:, 0], moving.scales[:, 0])
    assert not torch.equal(static.scales[:, 1], moving.scales[:, 1])


def test_awq_finds_the_scale_of_an_exhaustive_search() -> None:
    x, weight = inputs(64), torch.randn(6, 64, generator=torch.Generator().manual_seed(4))
    x, scheme = x * torch.where(torch.arange(64) % 21 == 0, 20.0, 1.0), Scheme.named("w4a16-g32")
    statistics = LayerStatistics(64, torch.device("cpu"))
    for part in x.split(50):
        statistics.add(part)
    errors = []
    for step in range(STEPS):
        scale = channel_scale(x.abs().mean(dim=0), step / STEPS)
        rounded = dequantise_weight(quantise_weight(weight * scale, "int4", group=32), torch.float32)
        errors.append(float(((x / scale) @ rounded.t() - x @ weight.t()).square().sum()))
    scale, power = search_scale(weight, statistics, scheme)
    assert power == errors.index(min(errors)) / STEPS
    torch.testing.assert_close(scale, channel_scale(x.abs().mean(dim=0), power))
    assert min(errors) < errors[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"norm": "layer", "norm_bias": True, "qkv_bias": True, "mlp_bias": True},
        {"norm_unit_offset": True},
        {"mlp": "plain", "parallel_residual": True},
        {"norm_placement": "post"},
    ],
    ids=str,
)
def test_scaling_inputs_leaves_the_function(options: dict[str, Any]) -> None:
    model = Transformer(ModelConfig(**{**SHAPE, **options}, max_positions=64, init_std=0.08)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    before = model(TOKENS)
    scaled: set[str] = set()
    for block in model.blocks.values():
        for place in input_scales(block):  # type: ignore[arg-type]
            columns = block.get_submodule(place.layer).in_features
            assert isinstance(columns, int)
            apply_scale(block, place, place.share(torch.rand(columns) + 0.5))  # type: ignore[arg-type]
            scaled.add(place.layer)
    torch.testing.assert_close(model(TOKENS), before, rtol=1e-3, atol=1e-3)
    assert ("attention.qkv" in scaled) == (options.get("norm_placement") != "post")
    assert "attention.out" in scaled
    assert ("mlp.down" in scaled) == (options.get("mlp") != "plain")


def test_smoothquant_balances_inputs_and_weights() -> None:
    x, weight = inputs(32), torch.randn(5, 32, generator=torch.Generator().manual_seed(6))
    statistics = LayerStatistics(32, torch.device("cpu"))
    statistics.add(x)
    scale = smoothing_scale(weight, statistics, 0.5)
    torch.testing.assert_close((x / scale).abs().amax(dim=0), (weight * scale).abs().amax(dim=0))


def test_smoothquant_finds_outliers_behind_attention_and_activation(model: Transformer) -> None:
    spread = copy.deepcopy(model)
    luck = torch.Generator().manual_seed(7)
    for block in spread.blocks.values():
        for place in input_scales(block):  # type: ignore[arg-type]
            columns = block.get_submodule(place.layer).in_features
            assert isinstance(columns, int)
            outliers = (2 * torch.randn(columns, generator=luck)).exp()
            if place.layer in ("attention.out", "mlp.down"):
                apply_scale(block, place, place.share(1 / outliers))  # type: ignore[arg-type]

    def loss(method: Any) -> float:
        small = compress.quantise(spread, "w8a8", method=method, data=TOKENS)
        return float((small(TOKENS) - spread(TOKENS)).square().mean())

    assert loss("smoothquant") < 0.25 * loss("rtn")


def test_int8_products_with_dynamic_inputs_are_the_product_of_the_codes() -> None:
    weight, x = torch.randn(9, 40), torch.randn(2, 3, 40)
    layer = DynamicQuantisedLinear(quantise_weight(weight, "int8"), torch.randn(9))
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    codes = (x / scale).round()
    expected = (codes.double() @ layer.weight.double().t()) * scale * layer.scales[:, 0] + layer.bias
    torch.testing.assert_close(layer(x), expected.float(), rtol=1e-5, atol=1e-5)


METHODS_OF = [
    *((name, "rtn") for name in NAMES if "g128" not in name),
    *(("w4a16-g32", method) for method in ("gptq", "awq")),
    *(("w8a8", method) for method in ("smoothquant", "gptq")),
]


@pytest.mark.parametrize(("name", "method"), METHODS_OF)
def test_a_quantised_model_is_near_the_dense_one(model: Transformer, name: str, method: Any) -> None:
    skip = ["*.mlp.down"] if "g64" in name else []
    before = copy.deepcopy(model.state_dict())
    small = compress.quantise(model, name, method=method, data=TOKENS, skip=skip)
    dense, logits = model(TOKENS), small(TOKENS)
    error = float((logits - dense).norm() / dense.norm())
    assert 0 < error < (0.35 if "w4" in name else 0.1)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    record = small.compression[-1]
    assert len(record["relative_error"]) + len(record["skipped"]) == 8
    again = compress.quantise(model, name, method=method, data=TOKENS, skip=skip)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in small.state_dict().items())


def test_calibrated_methods_beat_rounding(model: Transformer) -> None:
    def loss(method: Any) -> float:
        small = compress.quantise(model, "w4a16-g32", method=method, data=TOKENS)
        return float((small(TOKENS) - model(TOKENS)).square().mean())

    nearest = loss("rtn")
    assert loss("gptq") < 0.8 * nearest
    assert loss("awq") < nearest


def test_a_quantised_model_is_served_and_converted(model: Transformer) -> None:
    small = compress.quantise(model, "w4a16-g32-asym", method="gptq", data=TOKENS, head="int8")
    prompt = [1, 2, 3]
    tokens = torch.tensor([prompt])
    for _ in range(6):
        tokens = torch.cat([tokens, small(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
    for deterministic in (False, True):
        engine = Engine(small, deterministic=deterministic)
        out = engine.generate([prompt], SamplingParams(max_tokens=6, temperature=0))
        assert out[0].completions[0].token_ids == tokens[0, 3:].tolist()
    torch.testing.assert_close(
        -small(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0],
        small(tokens[:, :-1], tokens[:, 1:], reduction="none"),
        rtol=1e-3,
        atol=1e-3,
    )
    half = copy.deepcopy(small).to(torch.bfloat16)
    assert all(
        torch.equal(half.state_dict()[key], value)
        for key, value in small.state_dict().items()
        if key.startswith("blocks.") and key.endswith(("scales", "zeros", "attention.qkv.weight"))
    )
    assert float((half(tokens).float() - small(tokens)).norm() / small(tokens).norm()) < 0.03


def test_layers_are_skipped_by_name_and_by_sensitivity(model: Transformer) -> None:
    errors = compress.sensitivity(model, "w4a16-g32", TOKENS)
    small = compress.quantise(
        model, "w4a16-g32", method="gptq", data=TOKENS, skip=["blocks.0.attention.*"], keep_sensitive=2
    )
    skipped = small.compression[-1]["skipped"]
    left = {name: error for name, error in errors.items() if not name.startswith("blocks.0.attention")}
    worst = sorted(left, key=lambda name: -left[name])[:2]
    assert set(skipped) == {"blocks.0.attention.qkv", "blocks.0.attention.out", *worst}
    assert torch.equal(small.get_parameter("blocks.0.attention.qkv.weight"), model.blocks["0"].attention.qkv.weight)  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"scheme": "w3a16"}, "no scheme"),
        ({"scheme": "w4a16-g128"}, "columns"),
        ({"scheme": "w8a16", "method": "gptq"}, "needs calibration"),
        ({"scheme": "w8a16", "method": "smoothquant", "data": TOKENS}, "smoothquant"),
        ({"scheme": "w8a16", "skip": ["blocks.9.*"]}, "matches no layer"),
        ({"scheme": "w8a16", "skip": ["*"]}, "leaves no layer"),
        ({"scheme": "w8a16", "method": "best"}, "no method"),
        ({"scheme": "w8a16", "method": "gptq", "data": TOKENS[0]}, "samples, time"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_named(model: Transformer, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        compress.quantise(model, **arguments)


def test_statistics_of_a_layer_that_is_bypassed_are_an_error() -> None:
    model = Transformer(ModelConfig(vocab_size=32, dim=16, layers=1, heads=2, mlp_dim=32))
    block = model.blocks["0"]
    walk = BlockWalk(model, Calibration(torch.randint(32, (2, 8))))
    with pytest.raises(UsageError, match="never called"):
        walk.statistics("0", block, {"mlp.down": block.mlp.down, "other": Linear(16, 4)})
    # A fused kernel must not take the place of a layer whose input is wanted.
    handle = block.mlp.down.register_forward_pre_hook(lambda module, inputs: None)
    assert not block.mlp._can_fuse(torch.zeros(1, 64))
    handle.remove()
    assert has_forward_hooks(block.mlp.down) is False


@pytest.mark.parametrize("kind", ["latent", "experts"])
def test_other_blocks_are_quantised_where_they_can_be(kind: str, tmp_path: Path) -> None:
    moe = MoEConfig(
        experts=4, experts_per_token=2, expert_dim=32, shared_dim=32, scores="sigmoid", correction_bias=True
    )
    latent = LatentAttentionConfig(kv_rank=32, rope_dim=8, value_dim=16, q_rank=32)
    more: dict[str, Any] = {"moe": moe, "latent": latent, "kv_heads": 4, "head_dim": 24, "tied": False}
    if kind == "experts":
        more = {"moe": MoEConfig(experts=4, experts_per_token=2), "tied": False}
    model = Transformer(ModelConfig(**{**SHAPE, "max_positions": 64, **more})).requires_grad_(False)
    for method in ("rtn", "gptq", "awq"):
        given = {} if method == "rtn" else {"data": TOKENS}
        small = compress.quantise(model, "w4a16-g32", method=method, **given)
        record = small.compression[-1]
        assert "blocks.0.mlp.experts.down" in record["relative_error"]
        assert f"blocks.0.attention.{'q_a' if kind == 'latent' else 'qkv'}" in record["relative_error"]
        assert ("blocks.0.attention.kv_b" in record["skipped"]) == (kind == "latent")
        error = (small(TOKENS) - model(TOKENS)).square().mean() / model(TOKENS).square().mean()
        assert 0 < float(error) < 0.2
    if kind == "experts":
        save_folder(small, tmp_path / "small")
        loaded = load_folder(tmp_path / "small")
        assert isinstance(loaded.blocks["0"].mlp.experts, QuantisedExperts)
        torch.testing.assert_close(loaded(TOKENS), small(TOKENS), rtol=0, atol=0)
        dynamic = compress.quantise(model, "w8a8").compression[-1]
        assert "rounds their inputs" in dynamic["skipped"]["blocks.0.mlp.experts"]
    sparse = compress.prune(model, 0.5, method="magnitude")
    assert "blocks.0.mlp.router.score" in sparse.compression[-1]["skipped"]


def test_an_expert_is_rounded_with_the_inputs_of_its_own_tokens() -> None:
    more: dict[str, Any] = {"moe": MoEConfig(experts=4, experts_per_token=2), "layers": 1}
    model = Transformer(ModelConfig(**{**SHAPE, **more})).requires_grad_(False)
    seen: list[torch.Tensor] = []
    mlp: Any = model.blocks["0"].mlp
    handle = mlp.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].flatten(0, 1)))
    model(TOKENS)
    handle.remove()
    chosen, scheme = mlp.router(seen[0]).experts, Scheme.named("w4a16-g32")
    experts: Any = compress.quantise(model, scheme, method="gptq", data=TOKENS, skip=["*.attention.*"])
    codes = experts.blocks["0"].mlp.experts.gate_up_codes.dense()
    for expert in range(4):
        own = seen[0][(chosen == expert).any(dim=-1)]
        expected = dequantise_weight(gptq(mlp.experts.gate_up[expert], own.t() @ own, scheme), torch.float32)
        # Sums in another order may move a value that lies between two codes.
        assert (codes[expert] == expected).float().mean() > 0.99


@pytest.mark.parametrize("name", NAMES)
def test_codes_lie_row_by_row_as_kernels_read_them(name: str) -> None:
    scheme = Scheme.named(name)
    x = inputs(128)
    small = gptq(torch.randn(8, 128), x.t() @ x, scheme)
    assert small.data.is_contiguous()
    assert small.scales.is_contiguous()


@pytest.mark.parametrize("name", ["w4a16-g32", "w4a16-g32-asym"])
def test_ranges_of_groups_are_the_best_given_the_others(name: str) -> None:
    scheme, x = Scheme.named(name), inputs(64)
    weight, hessian = torch.randn(4, 64, generator=torch.Generator().manual_seed(3)), x.t() @ x
    found = search_clip(weight, hessian, scheme)
    plain = weight_grid(weight, "int4", group=32, symmetric=scheme.symmetric)

    def error(grid: WeightGrid) -> Tensor:
        return (x @ (grid.values(grid.codes(weight)) - weight).t()).square().sum(dim=0)

    assert bool((error(found) < error(plain)).any())
    assert bool((error(found) <= error(plain) * (1 + 1e-4)).all())
    # No other range of the last group, which was chosen last, gives a smaller error.
    for step in range(20):
        other = weight_grid(
            weight, "int4", group=32, symmetric=scheme.symmetric, clip=torch.tensor(1.0 - step * 0.5 / 20)
        )
        zeros = None if found.zeros is None else found.zeros.clone()
        mixed = WeightGrid("int4", found.scales.clone(), zeros)
        mixed.scales[:, 1] = other.scales[:, 1]
        if mixed.zeros is not None and other.zeros is not None:
            mixed.zeros[:, 1] = other.zeros[:, 1]
        assert bool((error(found) <= error(mixed) * (1 + 1e-4)).all())


def test_outputs_that_are_reused_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(vocab_size=61, dim=64, layers=2, heads=2, mlp_dim=128, max_positions=32))
    tokens = torch.randint(61, (6, 32))

    def codes() -> list[torch.Tensor]:
        small = compress.quantise(model, "w4a16-g32", method="gptq", data=tokens, batch_tokens=64)
        assert not [layer for layer in small.modules() if "forward" in vars(layer)]
        return [layer.weight for layer in small.modules() if isinstance(layer, QuantisedLinear)]

    reused = codes()
    monkeypatch.setattr(BlockWalk, "reuse", lambda walk, layer: None)
    assert all(torch.equal(one, other) for one, other in zip(reused, codes(), strict=True))
