"""The grouped experts are the loop over experts; the balance loss says what it should."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.models import ModelConfig, MoEConfig, Transformer
from piledriver.models.feed_forward.moe import MoE, sort_by_expert


@given(
    choices=st.lists(st.integers(0, 4), min_size=1, max_size=60).map(lambda xs: xs[: len(xs) // 2 * 2] or [0, 0]),
)
@settings(max_examples=60, deadline=None)
def test_every_choice_gets_a_row_of_its_expert(choices: list[int]) -> None:
    chosen = torch.tensor(choices).view(-1, 2)
    slots, ends, size = sort_by_expert(chosen, 5)
    assert len(set(slots.tolist())) == slots.numel()
    assert int(slots.max()) < size
    assert int(ends[-1]) == size
    assert (ends % 8 == 0).all()
    owners = torch.searchsorted(ends.long(), slots, right=True)
    assert torch.equal(owners, chosen.flatten())


def test_equal_to_a_loop_over_experts() -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=8, dim=16, layers=1, heads=2, mlp_dim=24, init_std=0.3, moe=MoEConfig(experts=4, experts_per_token=2)
    )
    moe = Transformer(config).blocks["0"].mlp
    assert isinstance(moe, MoE)
    x = torch.randn(2, 7, 16, requires_grad=True)
    out, _ = moe(x)

    tokens, routing = x.flatten(0, 1), moe.router(x.flatten(0, 1))
    pairs = moe.experts.gate_up.unflatten(1, (-1, 2, config.gate_block))
    expected = torch.zeros_like(tokens)
    for expert in range(4):
        gate, up = (pairs[expert, :, i].flatten(0, 1) for i in (0, 1))
        done = (F.silu(tokens @ gate.T) * (tokens @ up.T)) @ moe.experts.down[expert].T
        weight = torch.where(routing.experts == expert, routing.weights, 0.0).sum(dim=1, keepdim=True)
        expected = expected + weight * done
    torch.testing.assert_close(out.flatten(0, 1), expected, atol=1e-5, rtol=1e-4)
    parameters = [x, *moe.parameters()]
    goal = torch.randn_like(out)
    found = torch.autograd.grad((out * goal).sum(), parameters, retain_graph=True)
    wanted = torch.autograd.grad((expected * goal.flatten(0, 1)).sum(), parameters)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_balance_is_one_when_even_and_grows_when_not() -> None:
    config = ModelConfig(vocab_size=8, dim=16, layers=1, heads=2, moe=MoEConfig(experts=4, experts_per_token=1))
    router = Transformer(config).blocks["0"].mlp.router  # type: ignore[union-attr]
    x = torch.eye(4, 16).repeat(8, 1)
    with torch.no_grad():
        router.score.weight.copy_(torch.eye(4, 16) * 50)
        assert abs(router(x).balance.item() - 1.0) < 1e-3
        router.score.weight.copy_(torch.cat((torch.ones(1, 16), torch.zeros(3, 16))) * 50)
        assert abs(router(x).balance.item() - 4.0) < 1e-3


def test_balance_loss_joins_the_total() -> None:
    config = ModelConfig(vocab_size=8, dim=16, layers=2, heads=2, moe=MoEConfig(balance_coefficient=0.5))
    tokens = torch.randint(8, (2, 6))
    sums = Transformer(config)(tokens, tokens)
    torch.testing.assert_close(sums.total, sums.cross_entropy + 0.5 * sums.balance)
    assert sums.balance >= 0.9 * sums.tokens
