"""The decoder with fused MLP kernels gives what the plain one gives, under every transform."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import piledriver.functional as fn
from piledriver.functional.layers import transformer
from piledriver.kernels.gated_mlp import gated_linear


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
@pytest.mark.parametrize(
    ("compiled", "changes"),
    [(False, {}), (False, {"remat": True}), (False, {"scan": True}), (True, {"remat": True, "scan": True})],
)
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
@pytest.mark.parametrize("compiled", [False, True])
def test_the_decoder_with_kernels_is_the_one_without(compiled: bool) -> None:
    tokens = fn.randint(fn.key(0), (2, 64), 0, 31).cuda()

    def gradients(fuse: bool) -> Any:
        model = fn.Decoder(31, 64, 2, 4, 96, fuse_projections=fuse)
        params = model.init(fn.key(0), tokens)["params"]
        loss = lambda params: fn.cross_entropy(model.apply({"params": params}, tokens), tokens)  # noqa: E731
        return fn.value_and_grad(fn.jit(loss) if compiled else loss)(params)

    torch.testing.assert_close(gradients(True), gradients(False), rtol=1e-3, atol=1e-5)
