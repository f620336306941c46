"""Clipping is torch's, and says when the norm is not a number."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piledriver.optim import clip_gradients, gradient_norm
from piledriver.optim.clip import NonFiniteGradientError


@given(seed=st.integers(0, 1000), limit=st.floats(0.01, 100.0))
def test_equal_to_torch(seed: int, limit: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    ours = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((3, 4), (5,), (2, 2, 2))]
    for parameter in ours:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    ours.append(torch.nn.Parameter(torch.zeros(1)))  # without a gradient
    theirs = [torch.nn.Parameter(torch.zeros_like(parameter)) for parameter in ours]
    for a, b in zip(theirs, ours, strict=True):
        a.grad = None if b.grad is None else b.grad.clone()
    norm = clip_gradients(ours, limit)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, limit))
    for a, b in zip(ours, theirs, strict=True):
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)
    assert gradient_norm(ours) <= limit * 1.001


def test_non_finite_norm() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, float("nan")])
    with pytest.raises(NonFiniteGradientError, match="norm is nan"):
        clip_gradients([parameter], 1.0, error_if_nonfinite=True)
    assert clip_gradients([parameter], 1.0).isnan()
    assert gradient_norm([]) == 0.0
