"""The MLP that keeps only its inputs gives what the plain one gives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import piledriver.functional as fn
from piledriver.functional.layers import transformer
from piledriver.kernels.gated_mlp import gated_linear


def plainly(gate_up: Tensor, weight: Tensor, group: int) -> Tensor:
    gates, ups = torch.unflatten(gate_up, -1, (-1, 2, group)).unbind(-2)
    return F.linear((F.silu(gates) * ups).flatten(-2), weight)


@given(rows=st.integers(1, 7), groups=st.integers(1, 4), group=st.sampled_from([1, 4]), out=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_outputs_and_gradients_are_the_plain_ones(rows: int, groups: int, group: int, out: int) -> None:
    gate_up = torch.randn(2, rows, 2 * groups * group, requires_grad=True)
    weight = torch.randn(out, groups * group, requires_grad=True)
    found, expected = gated_linear(gate_up, weight, group), plainly(gate_up, weight, group)
    torch.testing.assert_close(found, expected)
    slope = torch.randn_like(found)
    for mine, theirs in zip(
        torch.autograd.grad(found, (gate_up, weight), slope),
        torch.autograd.grad(expected, (gate_up, weight), slope),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_only_the_inputs_are_kept() -> None:
    gate_up, weight = torch.randn(6, 16, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    kept: list[torch.Size] = []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        gated_linear(gate_up, weight, 4)
    assert sorted(kept) == sorted([gate_up.shape, weight.shape])


def test_the_gradient_of_a_weight_lies_in_memory_as_the_weight_does() -> None:
    gate_up = torch.randn(6, 16)
    for weight in (torch.randn(5, 8), torch.randn(8, 5).t()):
        weight.requires_grad_()
        (found,) = torch.autograd.grad(gated_linear(gate_up, weight, 4).sum(), weight)
        (expected,) = torch.autograd.grad(plainly(gate_up, weight, 4).sum(), weight)
        assert found.stride() == weight.stride()
        torch.testing.assert_close(found, expected)


def transformed(compiled: bool, **changes: Any) -> list[Any]:
    """Gradients of a small decoder by every way that takes another path through the transforms."""
    model = fn.Decoder(31, 16, 1, 4, 24, fuse_projections=True, **changes)
    tokens = fn.randint(fn.key(0), (2, 3, 9), 0, 31)
    params = model.init(fn.key(0), tokens[0])["params"]

    def loss(params: Any, tokens: Tensor) -> Tensor:
        return fn.cross_entropy(model.apply({"params": params}, tokens), tokens)

    def over_all(params: Any, tokens: Tensor) -> Tensor:
        return fn.vmap(loss, in_axes=(None, 0))(params, tokens).sum()

    jit = functools.partial(fn.jit, backend="aot_eager") if compiled else lambda function: function
    return [
        fn.grad(jit(loss))(params, tokens[0]),
        jit(fn.grad(loss))(params, tokens[0]),
        jit(fn.vmap(fn.grad(loss), in_axes=(None, 0)))(params, tokens),
        jit(fn.grad(over_all))(params, tokens),
        fn.grad(jit(over_all))(params, tokens),
    ]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does it
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("changes", [{}, {"remat": True}, {"scan": True}])
def test_the_decoder_takes_the_kernels_only_where_transforms_allow_it(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, changes: dict[str, Any]
) -> None:
    expected = transformed(False, **changes)
    taken: list[torch.Size] = []

    def noted(gate_up: Tensor, weight: Tensor, group: int) -> Tensor:
        taken.append(gate_up.shape)
        return gated_linear(gate_up, weight, group)

    monkeypatch.setattr(transformer, "can_fuse", lambda *_: True)
    if not compiled:  # a graph has no side effects
        monkeypatch.setattr(transformer, "gated_linear", noted)
    torch.compiler.reset()
    torch.testing.assert_close(transformed(compiled, **changes), expected, rtol=1e-4, atol=1e-5)
    assert compiled or taken


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_kernels_are_the_formula() -> None:
    gate_up = torch.randn(70, 2 * 96, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(40, 96, device="cuda").bfloat16().requires_grad_()
    slope = torch.randn(70, 40, device="cuda").bfloat16()
    found = torch.autograd.grad(gated_linear(gate_up, weight, 32), (gate_up, weight), slope)
    exact = torch.autograd.grad(plainly(gate_up.float(), weight.float(), 32), (gate_up, weight), slope.float())
    for mine, theirs in zip(found, exact, strict=True):
        assert float((mine.float() - theirs.float()).norm() / theirs.float().norm()) < 2e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_decoder_with_kernels_is_the_one_without(compiled: bool) -> None:
    tokens = fn.randint(fn.key(0), (2, 64), 0, 31).cuda()

    def gradients(fuse: bool) -> Any:
        model = fn.Decoder(31, 64, 2, 4, 96, fuse_projections=fuse)
        params = model.init(fn.key(0), tokens)["params"]
        loss = lambda params: fn.cross_entropy(model.apply({"params": params}, tokens), tokens)  # noqa: E731
        return fn.value_and_grad(fn.jit(loss) if compiled else loss)(params)

    torch.testing.assert_close(gradients(True), gradients(False), rtol=1e-3, atol=1e-5)
