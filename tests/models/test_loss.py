"""The chunked loss is the plain one, in value and gradient, for every option."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.kernels.cross_entropy.chunked import loss_and_gradients
from piledriver.models.loss import linear_cross_entropy, token_losses


def inputs(
    tokens: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(tokens, 16).to(dtype).requires_grad_()
    weight = torch.randn(37, 16).to(weight_dtype).requires_grad_()
    targets = torch.randint(37, (tokens,))
    targets[torch.rand(tokens) < 0.2] = -100
    return hidden, weight, targets


@given(
    tokens=st.integers(1, 40),
    chunk=st.integers(1, 50),
    z_loss=st.sampled_from([0.0, 1e-2]),
    softcap=st.sampled_from([None, 3.0]),
    scale=st.floats(0.1, 10.0),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_equal_to_the_plain_path(
    tokens: int, chunk: int, z_loss: float, softcap: float | None, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden, weight, targets = inputs(tokens, torch.float32, torch.float32)
    options = {"z_loss": z_loss, "softcap": softcap}
    plain = linear_cross_entropy(hidden, weight, targets, **options, chunk_tokens=0)
    expected = torch.autograd.grad(plain.total * scale, (hidden, weight))
    ours = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk, **options)
    found = torch.autograd.grad(ours.total * scale, (hidden, weight))
    torch.testing.assert_close(ours.total, plain.total, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ours.cross_entropy, plain.cross_entropy, rtol=1e-5, atol=1e-4)
    assert int(ours.tokens) == int(plain.tokens) == int((targets != -100).sum())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bf16_compute_keeps_the_dtype_of_each_input(weight_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight, targets = inputs(64, torch.bfloat16, weight_dtype)
    exact = linear_cross_entropy(hidden.float(), weight.float(), targets, chunk_tokens=0)
    expected = torch.autograd.grad(exact.total, (hidden, weight))
    ours = linear_cross_entropy(hidden, weight, targets, chunk_tokens=16)
    found = torch.autograd.grad(ours.total, (hidden, weight))
    torch.testing.assert_close(ours.total, exact.total, rtol=1e-2, atol=0.0)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.linalg.norm(a.float() - b.float()) < 0.02 * torch.linalg.norm(b.float())


def test_no_chunk_outlives_its_turn() -> None:
    """The largest tensor that forward and gradients make is far smaller than the logits of the batch."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    hidden, weight, targets = torch.randn(256, 8), torch.randn(500, 8), torch.randint(500, (256,))
    with Watch():
        loss_and_gradients(hidden, weight, targets, -100, 1e-4, 5.0, 16, True, True)
    assert largest == 16 * 500
    with Watch():
        linear_cross_entropy(hidden, weight, targets, chunk_tokens=0)
    assert largest == 256 * 500


def test_tied_weights_get_both_gradients() -> None:
    table, tokens = torch.randn(37, 16, requires_grad=True), torch.randint(37, (24,))
    targets = tokens.roll(-1)
    expected = torch.autograd.grad(linear_cross_entropy(table[tokens], table, targets, chunk_tokens=0).total, table)[0]
    found = torch.autograd.grad(linear_cross_entropy(table[tokens], table, targets, chunk_tokens=7).total, table)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_frozen_inputs_cost_no_gradient() -> None:
    hidden, weight, targets = inputs(20, torch.float32, torch.float32)
    frozen = weight.detach()
    (gradient,) = torch.autograd.grad(linear_cross_entropy(hidden, frozen, targets).total, hidden)
    (expected,) = torch.autograd.grad(linear_cross_entropy(hidden, frozen, targets, chunk_tokens=0).total, hidden)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, targets).total.requires_grad


def test_token_losses_are_the_terms_of_the_sum() -> None:
    hidden, weight, targets = inputs(30, torch.float32, torch.float32)
    losses = token_losses(hidden.view(2, 15, 16), weight, targets.view(2, 15), softcap=4.0, chunk_tokens=7)
    assert losses.shape == (2, 15)
    assert (losses.flatten()[targets == -100] == 0).all()
    sums = linear_cross_entropy(hidden, weight, targets, softcap=4.0, chunk_tokens=0)
    torch.testing.assert_close(losses.sum(), sums.total.detach())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_equal_on_a_gpu(weight_dtype: torch.dtype, softcap: float | None) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(1000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(2000, 64, device="cuda") * 0.3).to(weight_dtype).requires_grad_()
    targets = torch.randint(2000, (1000,), device="cuda")
    targets[::7] = -100
    exact = linear_cross_entropy(hidden.float(), weight.float(), targets, z_loss=1e-3, softcap=softcap, chunk_tokens=0)
    expected = torch.autograd.grad(exact.total, (hidden, weight))
    ours = linear_cross_entropy(hidden, weight, targets, z_loss=1e-3, softcap=softcap, chunk_tokens=256)
    found = torch.autograd.grad(ours.total, (hidden, weight))
    torch.testing.assert_close(ours.total, exact.total, rtol=1e-2, atol=0.0)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.linalg.norm(a.float() - b.float()) < 0.02 * torch.linalg.norm(b.float())
