"""Step blocks in the backward, as soon as their gradients have arrived: gradients are never resident all together.

Without clipping one backward is enough. Clipping by the global norm needs the norm before the first step, so it takes
two passes: `optimizer.step(closure)` runs the closure once to measure the norm of each gradient, which is then dropped,
and once more to step on gradients that are scaled as they arrive. Both passes draw the same random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from piledriver.engine.errors import EngineError
from piledriver.engine.offload.master import MasterWeight
from piledriver.engine.offload.stepping.block_step import BlockStep, StepRun
from piledriver.engine.tiers import Offload
from piledriver.optim.shards import local


class BackwardStep(BlockStep):
    """Steps one optimizer on each block when the gradients of the block have arrived."""

    def __init__(self, optimizer: Optimizer, tiers: Offload) -> None:
        super().__init__(optimizer, tiers)
        self.factor: Tensor | None = None
        """What clipping scales the gradients of the second pass by."""
        self._order: list[MasterWeight] = []
        self._run: StepRun | None = None
        self._next = 0
        self._seen: dict[MasterWeight, None] = {}
        self._norms: dict[MasterWeight, Tensor] = {}
        self._rates: list[Any] = []
        self._measures = self._is_broken = False

    def arrived(self, master: MasterWeight) -> None:
        """Take the gradient of a master weight, which is complete. Called by the thread that copies gradients."""
        if self._measures:
            assert master.tensor.grad is not None
            (self._norms[master],) = torch._foreach_norm([local(master.tensor.grad)])
            master.drop_gradient()
            return
        if self._run is None:
            self._begin()
        if master in self._seen:
            raise EngineError(
                "a second backward before optimizer.step(): the gradients of the first were applied when they arrived",
                fix="accumulate inside accelerator.accumulate() or no_sync, or use Offload(gradients='host')",
            )
        self._seen[master] = None
        self._is_broken = True
        self._advance()
        self._is_broken = False

    def _begin(self) -> None:
        if self._is_broken:
            raise EngineError("a backward failed after some blocks were stepped", fix="resume from the last checkpoint")
        held = [master for master in self.masters if master.tensor.requires_grad]
        known = dict.fromkeys(master for master in self._order if master in set(held))
        # Before the first backward: the last parameters are reached first.
        self._run = StepRun(self, self.blocks([*known, *(one for one in reversed(held) if one not in known)]))
        self._run.factor = self.factor
        self._next, self._seen, self._rates = 0, {}, self._learning_rates()

    def _learning_rates(self) -> list[Any]:
        return [float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group]

    def _advance(self, *, all_blocks: bool = False) -> None:
        """Step on the next blocks whose gradients are here."""
        assert self._run is not None
        blocks = self._run.blocks
        while self._next < len(blocks):
            block = blocks[self._next]
            if not all_blocks and any(piece.master not in self._seen for piece in block.pieces):
                return
            self._run.compute(block)
            self._next += 1
            for piece in block.pieces:
                if piece.is_last:
                    piece.master.drop_gradient()

    @torch.no_grad()
    def step(self) -> None:
        """Step on the blocks that some parameter without a gradient held up, and finish."""
        self.step_others()
        run = self._run
        if run is None:
            return
        if self._learning_rates() != self._rates:
            raise EngineError(
                f"the learning rates were {self._rates} in the backward, which stepped, and are "
                f"{self._learning_rates()} now",
                fix="step the scheduler after optimizer.step(), or use Offload(gradients='host')",
            )
        try:
            self._advance(all_blocks=True)
        finally:
            self._order, self._run, self._seen, self._norms, self.factor = list(self._seen), None, {}, {}, None
            run.finish()

    def step_twice(self, closure: Callable[[], Any], settle: Callable[[], None]) -> Any:
        """Run a closure to measure gradient norms, and again to step; return its second loss."""
        with _same_random_numbers(), torch.enable_grad():
            self._measures = True
            try:
                closure()
                settle()
            finally:
                self._measures = False
        with torch.enable_grad():
            loss = closure()
        settle()
        return loss

    def norm_of(self, master: MasterWeight) -> Tensor | None:
        """Return the norm of a gradient that was measured; raise if it was applied without."""
        if master in self._norms:
            return self._norms[master]
        if master in self._seen:
            raise EngineError(
                "gradients cannot be clipped after the backward, which stepped on them",
                fix="clip inside a closure and call optimizer.step(closure), which makes two passes, or use "
                "Offload(gradients='host') or 'disk'",
            )
        return None


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Restore the random generators of torch after the block."""
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        yield
