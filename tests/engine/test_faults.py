"""A rank that dies, a rank that takes another branch, a number that is not one: seen, named, no hang."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch
from torch import nn

from piledriver.accelerator import Accelerator
from piledriver.data.processes import group_world
from piledriver.engine import Layout
from piledriver.engine.finite import NonFiniteError
from piledriver.runtime.collectives import is_lost_peer
from piledriver.runtime.errors import DisagreementError, LostPeerError
from tests.checkpoint.processes import run as on_ranks

PATIENCE, SHORT = timedelta(seconds=60), timedelta(seconds=4)


def prepared(layout: Layout) -> tuple[Accelerator, nn.Module]:
    torch.manual_seed(0)
    run = Accelerator(world=group_world(), layout=layout)
    return run, run.prepare(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))))


def not_a_number(rank: int) -> None:
    for zero in (0, 2, 3):
        run, model = prepared(Layout(zero=zero))
        x = torch.ones(2, 4) if rank == 0 else torch.full((2, 4), float("nan"))
        run.backward(model(x).square().mean())
        with pytest.raises(NonFiniteError, match=r"rank 1: loss nan"):
            run.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        run.free_memory()


def another_branch(rank: int) -> None:
    run, model = prepared(Layout(zero=2, debug=True))
    run.backward(model(torch.ones(2, 4)).square().mean())
    with pytest.raises(DisagreementError, match="rank 1 differs from the others in backward number 2"):
        # One process takes a mean, the other forgot to.
        loss = model(torch.ones(2, 4)).square()
        run.backward(loss.mean() if rank == 0 else loss.sum(dim=0)[:1])


def named(rank: int) -> None:
    not_a_number(rank)
    another_branch(rank)


@pytest.mark.slow
def test_what_is_not_finite_and_who_differs_is_named() -> None:
    on_ranks(2, named, patience=PATIENCE)


def dies(rank: int, zero: int) -> str:
    run, model = prepared(Layout(zero=zero))
    run.backward(model(torch.ones(2, 4)).square().mean())
    if rank == 1:
        os._exit(1)
    try:
        for _ in range(3):
            run.backward(model(torch.ones(2, 4)).square().mean())
    except LostPeerError as error:
        return str(error)
    except RuntimeError as error:
        # With zero 3 the forward communicates too, and what torch raises there is the user's to see.
        return "another process is gone" if zero == 3 and is_lost_peer(error) else repr(error)
    return "nothing was noticed"


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_a_rank_that_dies_is_noticed(zero: int) -> None:
    said = on_ranks(2, dies, zero, dying=[1], patience=PATIENCE)[0]
    assert "another process is gone" in said


def stays_behind(rank: int) -> str:
    """Rank 1 leaves its loop one step early and does something else for longer than the others wait."""
    run, model = prepared(Layout(zero=1))
    run.backward(model(torch.ones(2, 4)).square().mean())
    if rank == 1:
        time.sleep(2 * SHORT.total_seconds())
        os._exit(0)
    try:
        run.backward(model(torch.ones(2, 4)).square().mean())
    except LostPeerError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.slow
def test_a_rank_that_does_less_is_noticed_when_patience_ends() -> None:
    said = on_ranks(2, stays_behind, dying=[1], patience=SHORT)[0]
    assert "averaging gradients in backward failed" in said
