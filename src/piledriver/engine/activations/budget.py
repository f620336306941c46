"""Recompute as few blocks as a budget allows, from what one block is seen to keep.

The first block of the first training forward runs with everything kept, and what stays alive is counted. From that
follows how many blocks must be recomputed; they are spread evenly. So no batch has to be made up beforehand, and no
more than the one block is ever above the budget. Blocks are taken to be equal: they are, in all but windowed stacks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from piledriver.engine.activations.saved_bytes import HeldBytes, tensor_bytes

_log = logging.getLogger(__name__)


class Budget:
    """What a model's blocks may keep together, and what follows from it once a block was seen."""

    def __init__(self, *, share: float, blocks: int) -> None:
        self.share, self.blocks = share, blocks
        self.bytes_kept: int | None = None
        """Of one block where everything is kept; None until the first forward."""
        self.bytes_recomputed = 0
        """Of one block that is recomputed: its inputs."""
        self.recomputed: frozenset[int] = frozenset()

    def plan(self, bytes_kept: int, bytes_recomputed: int) -> None:
        """Choose the blocks."""
        self.bytes_kept, self.bytes_recomputed = bytes_kept, bytes_recomputed
        saved = bytes_kept - bytes_recomputed
        over = self.blocks * bytes_kept * (1.0 - self.share)
        # A hair less than what is over: shares such as 0.1 are not exact in binary.
        count = 0 if saved <= 0 else min(self.blocks, -int(-(over - 1e-6 * bytes_kept) // saved))
        self.recomputed = frozenset(number * self.blocks // count for number in range(count)) if count else frozenset()
        level = logging.WARNING if self.predicted_share > self.share + 1e-6 else logging.INFO
        _log.log(level, "%s", self)

    @property
    def predicted_share(self) -> float:
        """What is kept, as a part of what keeping everything would take."""
        if not self.bytes_kept:
            return 1.0
        count = len(self.recomputed)
        kept = (self.blocks - count) * self.bytes_kept + count * self.bytes_recomputed
        return kept / (self.blocks * self.bytes_kept)

    def __str__(self) -> str:
        if self.bytes_kept is None:
            return f"activation budget {self.share:.0%}: not planned before the first forward"
        return (
            f"activation budget {self.share:.0%}: {len(self.recomputed)} of {self.blocks} blocks are recomputed, "
            f"{self.predicted_share:.1%} kept (a block keeps {self.bytes_kept} bytes, its inputs "
            f"{self.bytes_recomputed})"
        )


class KeepWithinBudget:
    """The forward of one block: kept or recomputed, as the budget that all blocks share says."""

    def __init__(self, forward: Callable[..., Any], recompute: Callable[..., Any], budget: Budget, number: int) -> None:
        self.forward, self.recompute, self.budget, self.number = forward, recompute, budget, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if self.budget.bytes_kept is None:
            held = HeldBytes()
            with held:
                out = self.forward(*args, **kwargs)
            outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            # What a block gives is what the next one takes, and that is kept in either case.
            passed_on = sum(tensor_bytes(leaf) for leaf in outputs)
            self.budget.plan(held.count(outputs) + passed_on, passed_on)
            return out
        return (self.recompute if self.number in self.budget.recomputed else self.forward)(*args, **kwargs)


def budget_of(model: nn.Module) -> Budget | None:
    """The budget that a model's blocks share, to print it; None where they have none."""
    for module in model.modules():
        forward: Any = module.__dict__.get("forward")
        while forward is not None:
            if isinstance(forward, KeepWithinBudget):
                return forward.budget
            forward = getattr(forward, "forward", None)
    return None
