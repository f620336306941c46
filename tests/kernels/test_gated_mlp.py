"""The MLP that keeps only its inputs gives what the plain one gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from piledriver.kernels.gated_mlp import ACTIVATIONS, gated_linear
from piledriver.models.layers import activate
from tests.kernels.interpreter import interpret

CHECK = """
import torch
from piledriver.kernels.gated_mlp.reference import ReferenceGate
from piledriver.kernels.gated_mlp.triton import TritonGate
torch.manual_seed(0)
gate_up, gradient = torch.randn(7, 2 * 96), torch.randn(7, 96)
for group, activation in ((32, "silu"), (96, "silu"), (96, "gelu_tanh"), (32, "gelu")):
    expected = ReferenceGate().forward(gate_up, group, activation)
    torch.testing.assert_close(TritonGate().forward(gate_up, group, activation), expected)
    found = TritonGate().backward(gate_up, gradient, group, activation)
    torch.testing.assert_close(found, ReferenceGate().backward(gate_up, gradient, group, activation))
"""


def test_the_triton_kernels_are_the_formula() -> None:
    interpret(CHECK)


def plainly(gate_up: Tensor, weight: Tensor, group: int, activation: str = "silu") -> Tensor:
    gates, ups = torch.unflatten(gate_up, -1, (-1, 2, group)).unbind(-2)
    return F.linear((activate(activation, gates) * ups).flatten(-2), weight)


@given(
    rows=st.integers(1, 7),
    groups=st.integers(1, 4),
    group=st.sampled_from([1, 4]),
    out=st.integers(1, 5),
    activation=st.sampled_from(ACTIVATIONS),
)
@settings(max_examples=30, deadline=None)
def test_outputs_and_gradients_are_the_plain_ones(
    rows: int, groups: int, group: int, out: int, activation: str
) -> None:
    gate_up = torch.randn(2, rows, 2 * groups * group, requires_grad=True)
    weight = torch.randn(out, groups * group, requires_grad=True)
    found, expected = gated_linear(gate_up, weight, group, activation), plainly(gate_up, weight, group, activation)
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_kernels_are_the_formula_on_a_gpu(activation: str) -> None:
    gate_up = torch.randn(70, 2 * 96, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(40, 96, device="cuda").bfloat16().requires_grad_()
    slope = torch.randn(70, 40, device="cuda").bfloat16()
    found = torch.autograd.grad(gated_linear(gate_up, weight, 32, activation), (gate_up, weight), slope)
    plain = plainly(gate_up.float(), weight.float(), 32, activation)
    exact = torch.autograd.grad(plain, (gate_up, weight), slope.float())
    for mine, theirs in zip(found, exact, strict=True):
        assert float((mine.float() - theirs.float()).norm() / theirs.float().norm()) < 2e-2
