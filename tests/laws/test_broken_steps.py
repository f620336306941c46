"""A step that broke off, out of memory in the forward or the backward, changes nothing: the next one is the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from piledriver.accelerator import Accelerator
from piledriver.engine import EngineError, Layout
from piledriver.runtime.errors import LostPeerError
from piledriver.runtime.world import group_world
from tests.checkpoint.processes import run as on_ranks
from tests.laws.test_layouts import VOCAB, make_model

ALONE = {
    "plain": None,
    "full": Layout(compile=False, activations="full", activation_offload=True),
    "budget": Layout(compile=False, activations="budget"),
    "fp16": Layout(compile=False, precision="fp16"),
    "offload-optimizer": Layout(compile=False, offload="optimizer", precision="bf16"),
    "offload-parameters": Layout(compile=False, offload="parameters"),
}
TWO = {
    "ddp": None,
    "zero0": Layout(),
    "zero1": Layout(zero=1),
    "zero2": Layout(zero=2),
    "zero3": Layout(zero=3),
    "zero3-full": Layout(zero=3, activations="full"),
    "zero3-offload": Layout(zero=3, offload="optimizer"),
    "zero3-offload-parameters": Layout(zero=3, offload="parameters"),
    "tp": Layout(tp=2),
    "cp": Layout(cp=2),
    "ep": Layout(ep=2),
}
SMALL, LARGE = 4, 8


class OutOfMemory:
    """Makes blocks of a model fail while it is told to."""

    def __init__(self, model: nn.Module) -> None:
        self.at: str | None = None
        first, second = model.blocks["0"], model.blocks["1"]
        second.register_forward_pre_hook(lambda *_: self.strike("forward"))
        # Reached by the backward when the second block has its gradients, and the first has none.
        first.register_forward_hook(lambda _module, _args, out: tuple(self._struck(member) for member in out))

    def strike(self, at: str) -> None:
        if self.at == at:
            raise torch.OutOfMemoryError("out of memory (made up)")

    def _struck(self, member: Any) -> Any:
        if isinstance(member, torch.Tensor) and member.requires_grad:
            member.register_hook(lambda _gradient: self.strike("backward"))
        return member

    @contextmanager
    def struck(self, at: str) -> Iterator[None]:
        self.at = at
        try:
            yield
        finally:
            self.at = None


def trained(
    layout: Layout | None, fails: str | None, *, window: int = 1
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of three windows; in each but the first a larger batch is tried before, and fails."""
    world = group_world() if dist.is_initialized() else None
    accelerator = Accelerator(cpu=world is None, world=world, layout=layout, gradient_accumulation_steps=window)
    model = make_model("moe" if layout is not None and layout.ep > 1 else "transformer")
    memory = OutOfMemory(model)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    losses: list[float] = []

    def step(number: int, rows: int) -> None:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(VOCAB, (LARGE, 17), generator=generator)[:rows]
        with accelerator.accumulate(model, count=tokens.numel() if window > 1 else None):
            sums = model(tokens[:, :-1], tokens[:, 1:])
            accelerator.backward(sums.total / sums.tokens)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(sums.total.detach() / sums.tokens))

    for number in range(3 * window):
        # A window whose backward failed is lost; one whose forward failed goes on.
        if fails is not None and number >= window and (fails == "forward" or number % window == 0):
            with memory.struck(fails), pytest.raises(torch.OutOfMemoryError):
                step(number, LARGE)
            if number % window == 0:
                optimizer.zero_grad()
        step(number, SMALL)
    weights = {name: _whole(tensor).clone() for name, tensor in model.state_dict().items()}
    return losses, weights


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def check(layout: Layout | None, *, window: int = 1) -> None:
    losses, weights = trained(layout, None, window=window)
    for fails in ("forward", "backward"):
        found, came = trained(layout, fails, window=window)
        torch.testing.assert_close(found, losses, rtol=1e-6, atol=0, msg=lambda m, at=fails: f"{at}: {m}")
        for name, weight in weights.items():
            # A last batch that fails has divided the gradients of its window, which are multiplied back: that rounds
            # twice. A step moves a weight by up to 0.01.
            torch.testing.assert_close(came[name], weight, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", ALONE)
def test_the_next_step_is_as_if_none_had_failed(name: str) -> None:
    check(ALONE[name])


def test_a_batch_that_failed_is_none_of_its_window() -> None:
    check(None, window=2)
    check(Layout(compile=False), window=2)


def test_a_step_that_fails_after_unscaling_leaves_no_scaled_gradients() -> None:
    accelerator = Accelerator(cpu=True, layout=Layout(compile=False, precision="fp16"))
    model = make_model("transformer")
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.randint(VOCAB, (4, 17))

    def norm() -> float:
        sums = model(tokens[:, :-1], tokens[:, 1:])
        accelerator.backward(sums.total / sums.tokens)
        return float(accelerator.clip_grad_norm_(model.parameters(), 1e9))

    first = norm()
    # The step itself found no memory for its states, say.
    optimizer.zero_grad()
    assert norm() == pytest.approx(first)


@pytest.mark.slow
def test_the_next_step_is_as_if_none_had_failed_on_two() -> None:
    on_ranks(2, _check_all)


def _check_all(_rank: int) -> None:
    for name, layout in TWO.items():
        try:
            check(layout)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    check(Layout(zero=2), window=2)
    check(Layout(zero=3), window=2)


@pytest.mark.slow
def test_a_pipeline_tries_again_what_no_stage_has_begun_and_refuses_the_rest(tmp_path: Path) -> None:
    on_ranks(2, _pipeline, tmp_path / "rank-0-was-right", dying={0})
    assert (tmp_path / "rank-0-was-right").exists()


def _pipeline(rank: int, word: Path) -> None:
    accelerator = Accelerator(world=group_world(), layout=Layout(pp=2, microbatches=2))
    model = make_model("transformer")
    memory = OutOfMemory(model)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(rows: int) -> None:
        tokens = torch.arange(rows * 17).view(rows, 17) % VOCAB
        sums = model(tokens[:, :-1], tokens[:, 1:])
        accelerator.backward(sums.total / sums.tokens)
        optimizer.step()
        optimizer.zero_grad()

    # Only the second rank has no memory, but both know and can go on.
    with memory.struck("forward"), pytest.raises(torch.OutOfMemoryError):
        step(LARGE)
    step(SMALL)
    # In the middle of a schedule the other rank waits for what will not come: nobody goes on with wrong numbers.
    with memory.struck("backward"), pytest.raises(torch.OutOfMemoryError if rank == 0 else LostPeerError):
        step(SMALL)
    with pytest.raises(EngineError, match="out of step"):
        step(SMALL)
    if rank == 0:
        word.touch()
        os._exit(0)
