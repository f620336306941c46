"""fp8 casts, products and layers: the numbers that the rule says, gradients near the exact ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from piledriver.kernels.fp8 import BACKWARD, FORWARD, fp8_gated_mlp, fp8_linear
from piledriver.kernels.fp8.reference import ReferenceFp8

FP8 = ReferenceFp8()


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


@given(exponent=st.integers(-20, 20), seed=st.integers(0, 99), dtype=st.sampled_from([FORWARD, BACKWARD]))
@settings(max_examples=30, deadline=None)
def test_a_cast_is_within_half_a_step_of_the_format(exponent: int, seed: int, dtype: torch.dtype) -> None:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    small, columns, scale = FP8.cast(x, dtype)
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
    assert torch.equal(FP8.cast_rows(x, dtype)[0].float(), (x.float() * factor).clamp(-limit, limit).to(dtype).float())
    whole = (x.float() * factor.amin()).clamp(-limit, limit).to(dtype)
    assert torch.equal(FP8.cast(x, dtype)[0].float(), whole.float())


def test_rows_have_scales_of_their_own() -> None:
    x = torch.randn(4, 16) * torch.tensor([[1.0], [1e3], [1e-3], [0.0]])
    small, scale = FP8.cast_rows(x, FORWARD)
    assert torch.equal(small.float().abs().amax(dim=1), torch.tensor([448.0, 448.0, 448.0, 0.0]))
    assert relative(small.float()[:3] * scale[:3], x[:3]) < 0.04


@pytest.mark.parametrize("rowwise", [False, True])
def test_a_linear_layer_computes_what_its_casts_say(rowwise: bool) -> None:
    x, weight = torch.randn(2, 8, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    y = fp8_linear(x, weight, rowwise=rowwise)
    rows = x.detach().flatten(0, 1)
    if rowwise:
        (x8, x_scale), (w8, w_scale) = FP8.cast_rows(rows, FORWARD), FP8.cast_rows(weight.detach(), FORWARD)
    else:
        (x8, _, x_scale), (w8, _, w_scale) = FP8.cast(rows, FORWARD), FP8.cast(weight.detach(), FORWARD)
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
    value, scale = FP8.gate(gate_up, 32)
    _, _, _, again = FP8.gate_backward(gate_up, torch.randn(16, 64), scale, 32)
    assert torch.equal(again.float(), value.float().t())


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("rows", [16, 5])
def test_the_operators_keep_their_contract(rowwise: bool, rows: int) -> None:
    x, weight = torch.randn(rows, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    checks = "test_faketensor"  # the other checks multiply or compare fp8 tensors, which torch cannot
    torch.library.opcheck(torch.ops.piledriver.fp8_linear.default, (x, weight, rowwise, True), test_utils=checks)
    gate_up, down = torch.randn(64, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True)
    torch.library.opcheck(torch.ops.piledriver.fp8_gated_mlp.default, (x, gate_up, down, 16, True), test_utils=checks)
