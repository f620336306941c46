"""Expert parallel: the same function, gradients and balance as one process; what is dropped is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from piledriver.compress import quantise
from piledriver.engine import Layout, LayoutError
from piledriver.engine.expert_parallel import apply_ep
from piledriver.engine.expert_parallel.apply import check_ep_divisible, dropped_choices, expert_modules
from piledriver.engine.mesh import make_mesh
from piledriver.models import MoEConfig, Transformer
from tests.checkpoint.processes import run
from tests.engine.parallel_steps import assert_like_one_process, config, lay_out, train

SHAPE = config(moe=MoEConfig(experts=4, experts_per_token=2, balance_coefficient=0.1), mlp_dim=64)

BIASED = config(
    mlp_bias=True,
    gate_limit=0.1,
    moe=MoEConfig(experts=4, expert_dim=64, shared_dim=64, dense_layers=(0,), router_bias=True, correction_bias=True),
)


def _on_two(rank: int) -> None:
    for layout in (Layout(ep=2), Layout(ep=2, zero=3), Layout(zero=3), Layout(zero=1)):
        assert_like_one_process(SHAPE, layout)
    assert_like_one_process(SHAPE, Layout(cp=2, ep=2), time=12)
    for layout in (Layout(ep=2), Layout(ep=2, zero=3), Layout(zero=3)):
        assert_like_one_process(BIASED, layout)
    with pytest.raises(LayoutError, match=r"expert_capacity 2\.0, but experts with biases"):
        lay_out(Transformer(BIASED), Layout(ep=2, expert_capacity=2.0))
    # With room for all, a capacity changes nothing.
    assert_like_one_process(SHAPE, Layout(ep=2, expert_capacity=2.0))
    model = Transformer(SHAPE)
    lay_out(model, Layout(ep=2))
    held = expert_modules(model)
    assert len(held) == SHAPE.layers
    assert all(module.gate_up.to_local().shape[0] == 2 for module in held)
    assert dropped_choices(model) == (0, 0)
    _what_has_no_room(rank)


def _what_has_no_room(rank: int) -> None:
    """Tokens that all want the same experts: half of the first one's fit, and the rest passes by."""
    model = Transformer(SHAPE)
    mesh = lay_out(model, Layout(ep=2, expert_capacity=1.0))
    losses, _ = train(model, mesh, time=8, steps=1)
    assert losses.isfinite().all()
    dropped, choices = dropped_choices(model)
    assert choices == SHAPE.layers * 2 * 2 * 8
    assert 0 < dropped < choices / 2
    moe = model.blocks["0"].mlp
    same = torch.ones(1, 8, SHAPE.dim)
    before = dropped_choices(model)[0]
    out, _ = moe(same)
    # 8 equal tokens with 2 choices each; an even share of 16 choices over 4 experts is 4.
    assert dropped_choices(model)[0] - before == 8
    assert out[0, 4:].abs().max() == 0
    assert out[0, :4].abs().min(dim=-1).values.max() > 0
    moe.eval()
    whole, _ = moe(same)
    torch.testing.assert_close(whole[0, 4:], whole[0, :4], msg="an evaluation drops nothing")


@pytest.mark.slow
def test_spread_experts_are_the_same_function() -> None:
    run(2, _on_two)


def _on_four(rank: int) -> None:
    for layout in (Layout(ep=2, zero=3), Layout(ep=4), Layout(ep=2, tp=2), Layout(ep=2, zero=3, dp_replicate=2)):
        assert_like_one_process(SHAPE, layout)
    assert_like_one_process(BIASED, Layout(ep=2, tp=2))


@pytest.mark.slow
def test_experts_beside_other_axes() -> None:
    run(4, _on_four)


def test_an_ep_that_does_not_fit_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"ep 3 does not divide the 8 experts\. Fix: use ep=2"):
        check_ep_divisible(8, 3)
    with pytest.raises(LayoutError, match="ep 2, but Linear has neither `MoE` layers nor stacked experts"):
        apply_ep(nn.Linear(2, 2), replace(make_mesh(Layout(), "cpu"), layout=Layout(ep=2)))
    quantised = quantise(Transformer(SHAPE, seed=1), "w8a16")
    with pytest.raises(LayoutError, match="ep does not shard quantised experts"):
        apply_ep(quantised, replace(make_mesh(Layout(), "cpu"), layout=Layout(ep=2)))
