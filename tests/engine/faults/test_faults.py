"""A rank that dies, a rank that takes another branch, a number that is not one: seen, named, no hang."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
from torch import nn

from piledriver.accelerator import Accelerator
from piledriver.core.errors import UsageError
from piledriver.engine import Layout
from piledriver.engine.optimizer.nonfinite import NonFiniteError
from piledriver.runtime.errors import DisagreementError, LostPeerError
from piledriver.runtime.world import group_world
from tests.checkpoint.processes import run as on_ranks
from tests.patience import HANG_S

PATIENCE, SHORT = timedelta(seconds=HANG_S), timedelta(seconds=6)


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


class Branches(nn.Module):
    """Three blocks; in the second one a rank may be killed, or go around it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.fate = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number == 1 and self.fate == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if number != (2 if self.fate == "around the last" else 1) or not self.fate.startswith("around"):
                x = block(x)
        return x


def meets_its_fate(rank: int, fate: str, layout: Layout) -> str:
    """The last rank's; what each of the others says of it."""
    torch.manual_seed(0)
    run = Accelerator(world=group_world(), layout=layout)
    model = run.prepare(Branches())
    run.backward(model(torch.ones(2, 4)).square().mean())
    if rank == run.num_processes - 1:
        model.fate = fate
        if fate == "killed in between":
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(3):
            run.backward(model(torch.ones(2, 4)).square().mean())
    except (LostPeerError, DisagreementError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was noticed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fate", "zero", "where"),
    [
        ("killed in between", 1, "averaging gradients in backward number 2"),
        ("killed in between", 3, "forward number 2"),
        ("killed", 3, "forward number 2"),
    ],
)
def test_a_rank_that_dies_is_named(fate: str, zero: int, where: str) -> None:
    said = on_ranks(3, meets_its_fate, fate, Layout(zero=zero), dying=[2], patience=PATIENCE)  # type: ignore[arg-type]
    for rank in (0, 1):
        assert f"LostPeerError: rank {rank}: {where} failed because rank 2 is gone" in said[rank]


@pytest.mark.slow
def test_a_rank_that_goes_around_a_block_is_named() -> None:
    """With zero 3 it gathers another block than the others. In debug mode nothing is gathered before all agree."""
    for each in on_ranks(3, meets_its_fate, "around", Layout(zero=3, debug=True), patience=PATIENCE):
        assert each.startswith("DisagreementError: rank 2 differs from the others in the operation: ")
        assert "the forward of blocks.2, the others the forward of blocks.1" in each
    # Also where it leaves out the last block, and calls torch's backward at once.
    for each in on_ranks(2, meets_its_fate, "around the last", Layout(zero=3, debug=True), patience=PATIENCE):
        assert "the end of the forward, the others the forward of blocks.2" in each
    # Without it the group's patience ends, and whoever notices first breaks it off.
    said = on_ranks(2, meets_its_fate, "around", Layout(zero=3), patience=SHORT, dying=[1])
    assert any("backward number 2 failed because" in each for each in said if each is not None), said


def takes_part_no_more(rank: int) -> None:
    run = Accelerator(world=group_world())
    model = run.prepare(nn.Linear(4, 4))
    with run.join_uneven_inputs([model]), pytest.raises(UsageError, match="a rank that ran out of data"):  # noqa: SIM117
        with run.accumulate(model, count=3):
            pass
    run, model = prepared(Layout(zero=1))
    with pytest.warns(UserWarning, match=r"the model has Layout\(.*zero=1"), run.join_uneven_inputs([model]):
        pass


@pytest.mark.slow
def test_uneven_inputs_are_refused_where_ranks_would_wait() -> None:
    on_ranks(2, takes_part_no_more, patience=PATIENCE)


@pytest.mark.slow
def test_the_dead_rank_is_named_and_not_the_first_one_that_noticed() -> None:
    """Rank 0, which serves the store, ends right after its error: the others still learn who died."""
    for _ in range(2):
        said = on_ranks(4, ends_at_once, dying=[2], patience=PATIENCE)
        for rank in (0, 1, 3):
            assert "rank 2 is gone" in said[rank], said


def ends_at_once(rank: int) -> str:
    run, model = prepared(Layout(zero=3))
    run.backward(model(torch.ones(2, 4)).square().mean())
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        run.backward(model(torch.ones(2, 4)).square().mean())
    except LostPeerError as error:
        return str(error)
    return "nothing was noticed"


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
    assert (
        "averaging gradients in backward number 2 failed because rank 1 is gone, hangs or does something else" in said
    )
