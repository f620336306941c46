"""fp8 layers: the same numbers as the rule says, gradients near the exact ones, names and keys untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from piledriver.engine import Layout
from piledriver.engine.activations.checkpoint import apply_activation_checkpointing
from piledriver.engine.fp8 import ops as fp8_ops
from piledriver.engine.fp8.apply import apply_fp8, fp8_layers
from piledriver.engine.fp8.ops import fp8_gated_mlp, fp8_linear
from piledriver.engine.precision import apply_precision
from piledriver.kernels.fp8.matmul import BACKWARD, FORWARD, cast, cast_rows, gate, gate_backward, product
from piledriver.models import ModelConfig, Transformer
from piledriver.optim import SplitMasterAdamW

SHAPE = ModelConfig(vocab_size=64, dim=32, layers=2, heads=2, mlp_dim=64, max_positions=16)


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


@given(exponent=st.integers(-20, 20), seed=st.integers(0, 99), dtype=st.sampled_from([FORWARD, BACKWARD]))
@settings(max_examples=30, deadline=None)
def test_a_cast_is_within_half_a_step_of_the_format(exponent: int, seed: int, dtype: torch.dtype) -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    small, columns, scale = cast(x, dtype)
    back = small.float() * scale
    # Half a step of the mantissa, or of the subnormal numbers next to zero.
    info = torch.finfo(dtype)
    allowed = torch.maximum(x.abs() * info.eps / 2, scale * info.smallest_normal * info.eps / 2)
    assert bool(((back - x).abs() <= allowed * 1.001).all())
    assert torch.equal(columns.float(), small.float().t())
    assert float(small.float().abs().max()) == info.max


@given(seed=st.integers(0, 999), dtype=st.sampled_from([FORWARD, BACKWARD]))
@settings(max_examples=60, deadline=None)
def test_the_factor_is_rounded_once(seed: int, dtype: torch.dtype) -> None:
    """Many bf16 numbers lie between two fp8 ones: with a factor that is off by one bit all of them would move."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(seed)).bfloat16()
    limit = torch.finfo(dtype).max
    # Divided in double and rounded to single is the correctly rounded quotient of two singles.
    factor = (limit / x.abs().amax(dim=1, keepdim=True).double()).float()
    assert torch.equal(cast_rows(x, dtype)[0].float(), (x.float() * factor).clamp(-limit, limit).to(dtype).float())
    whole = (x.float() * factor.amin()).clamp(-limit, limit).to(dtype)
    assert torch.equal(cast(x, dtype)[0].float(), whole.float())


def test_rows_have_scales_of_their_own() -> None:
    x = torch.randn(4, 16) * torch.tensor([[1.0], [1e3], [1e-3], [0.0]])
    small, scale = cast_rows(x, FORWARD)
    assert torch.equal(small.float().abs().amax(dim=1), torch.tensor([448.0, 448.0, 448.0, 0.0]))
    assert relative(small.float()[:3] * scale[:3], x[:3]) < 0.04


@pytest.mark.parametrize("rowwise", [False, True])
def test_a_linear_layer_computes_what_its_casts_say(rowwise: bool) -> None:
    x, weight = torch.randn(2, 8, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    y = fp8_linear(x, weight, rowwise=rowwise)
    rows = x.detach().flatten(0, 1)
    if rowwise:
        (x8, x_scale), (w8, w_scale) = cast_rows(rows, FORWARD), cast_rows(weight.detach(), FORWARD)
    else:
        (x8, _, x_scale), (w8, _, w_scale) = cast(rows, FORWARD), cast(weight.detach(), FORWARD)
    expected = (x8.double() * x_scale) @ (w8.double() * w_scale).t()
    assert relative(y.flatten(0, 1), expected) < 1e-6
    exact = F.linear(x, weight)
    assert relative(y, exact) < 0.06
    slope = torch.randn_like(y)
    found, wanted = torch.autograd.grad(y, (x, weight), slope), torch.autograd.grad(exact, (x, weight), slope)
    assert relative(found[0], wanted[0]) < 0.12
    assert relative(found[1], wanted[1]) < (1e-6 if rowwise else 0.12)


@pytest.mark.parametrize("rows", [1, 7, 16])
def test_any_number_of_rows(rows: int) -> None:
    x, weight = torch.randn(rows, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    for rowwise in (False, True):
        y = fp8_linear(x, weight, rowwise=rowwise)
        y.sum().backward()
        assert y.shape == (rows, 16)
        assert x.grad is not None
        assert relative(x.grad, weight.detach().sum(0).expand(rows, -1)) < 0.2
        x.grad = None


def test_the_gated_mlp_is_its_layers_one_by_one() -> None:
    x, gate_up, down = (torch.randn(*size) for size in ((24, 32), (128, 32), (32, 64)))
    leaves = [tensor.requires_grad_() for tensor in (x, gate_up, down)]
    y = fp8_gated_mlp(x, gate_up, down, 16)
    gates, ups = F.linear(x, gate_up).unflatten(-1, (-1, 2, 16)).unbind(-2)
    exact = F.linear((F.silu(gates) * ups).flatten(-2), down)
    assert relative(y, exact) < 0.1
    slope = torch.randn_like(y)
    for found, wanted in zip(
        torch.autograd.grad(y, leaves, slope), torch.autograd.grad(exact, leaves, slope), strict=True
    ):
        assert relative(found, wanted) < 0.2


def test_the_activation_in_the_backward_is_that_of_the_forward() -> None:
    gate_up = torch.randn(16, 128)
    value, scale = gate(gate_up, 32)
    _, _, _, again = gate_backward(gate_up, torch.randn(16, 64), scale, 32)
    assert torch.equal(again.float(), value.float().t())


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise", "fp8-pure"])
def test_keys_and_names_stay_and_the_head_is_left_alone(precision: str) -> None:
    model = Transformer(ModelConfig(**{**vars(SHAPE), "tied": False}))
    keys, names = list(model.state_dict()), [name for name, _ in model.named_modules()]
    assert apply_fp8(model, None, Layout(precision=precision), worth=0) is model  # type: ignore[arg-type]
    assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_modules()] == names
    whole = () if precision == "fp8-rowwise" else ("mlp",)
    layers = ("attention.qkv", "attention.out", *whole, "mlp.gate_up", "mlp.down")
    assert fp8_layers(model) == [f"blocks.{block}.{layer}" for block in "01" for layer in layers]


def test_layers_that_would_lose_are_left_alone() -> None:
    config = ModelConfig(vocab_size=64, dim=768, layers=1, heads=12, mlp_dim=2048, max_positions=16)
    model = apply_fp8(Transformer(config), None, Layout(precision="fp8"))
    assert fp8_layers(model) == ["blocks.0.mlp", "blocks.0.mlp.gate_up"]


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise", "fp8-pure"])
def test_a_model_learns_as_without(precision: str) -> None:
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(1))
    losses = {}
    for name in ("fp32", precision):
        layout = Layout(precision=name)  # type: ignore[arg-type]
        model = Transformer(SHAPE)
        if layout.has_bf16_weights:
            apply_precision(model, None, layout)
        apply_fp8(model, None, layout, worth=0)
        optimizer = SplitMasterAdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.999), weight_decay=0.01)
        for _ in range(30):
            sums = model(tokens[:, :-1], tokens[:, 1:])
            loss = sums.total / sums.tokens
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[name] = float(loss.detach())
    assert losses["fp32"] < 3.0
    assert losses[precision] == pytest.approx(losses["fp32"], rel=0.05)


def test_recomputed_activations_give_the_same_gradients() -> None:
    model = apply_fp8(Transformer(SHAPE), None, Layout(precision="fp8"), worth=0)
    x = torch.randn(2, 8, 32)
    block = model.blocks["0"].mlp
    plain = torch.autograd.grad(block(x).square().sum(), list(block.parameters()))
    again = torch.autograd.grad(
        torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False).square().sum(), list(block.parameters())
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise"])
def test_selective_keeps_the_products(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `selective` recomputes are norms and elementwise work, not the layers: their products are taken once."""
    taken: list[bool] = []

    def counted(*args: Tensor, fast: bool = False, **options: Any) -> Tensor:
        taken.append(fast)
        return product(*args, fast=fast, **options)

    monkeypatch.setattr(fp8_ops, "product", counted)
    counts, gradients = {}, {}
    for activations in ("keep", "selective", "full"):
        layout = Layout(precision=precision, activations=activations)  # type: ignore[arg-type]
        model = apply_fp8(Transformer(SHAPE), None, layout, worth=0)
        apply_activation_checkpointing(model, None, layout)
        taken.clear()
        model(torch.arange(16).view(1, 16), torch.arange(16).view(1, 16)).total.backward()
        # Products of the forward are those that may sum in fewer bits.
        counts[activations] = sum(taken)
        gradients[activations] = [parameter.grad for parameter in model.parameters()]
    assert counts["selective"] == counts["keep"] > 0
    assert counts["full"] == 2 * counts["keep"]
    for one in ("selective", "full"):
        assert all(torch.equal(a, b) for a, b in zip(gradients[one], gradients["keep"], strict=True))


def test_autocast_decides_the_dtype() -> None:
    layer = apply_fp8(nn.Sequential(nn.Linear(32, 16)), None, Layout(precision="fp8"), worth=0)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(4, 32)).dtype == torch.bfloat16
    assert layer(torch.randn(4, 32)).dtype == torch.float32
