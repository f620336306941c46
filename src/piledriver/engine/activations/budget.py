"""Recompute as few blocks as a memory budget allows.

The first block of the first training forward keeps everything, and the bytes that stay alive are counted. They
determine how many blocks must be recomputed; these are spread evenly. Blocks are assumed to be equal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from piledriver.engine.activations.saved_bytes import HeldBytes, local_bytes
from piledriver.engine.hf_kv_cache import without_empty_caches

_log = logging.getLogger(__name__)


class Budget:
    """The activation budget of a model's blocks, and which blocks to recompute, once one was measured."""

    def __init__(self, *, share: float, blocks: int) -> None:
        self.share, self.blocks = share, blocks
        self.bytes_kept: int | None = None
        """Bytes of one block that keeps everything; None until the first forward."""
        self.bytes_recomputed = 0
        """Bytes of one recomputed block: its inputs."""
        self.recomputed: frozenset[int] = frozenset()

    def plan(self, bytes_kept: int, bytes_recomputed: int) -> None:
        """Choose the blocks to recompute."""
        self.bytes_kept, self.bytes_recomputed = bytes_kept, bytes_recomputed
        saved = bytes_kept - bytes_recomputed
        over = self.blocks * bytes_kept * (1.0 - self.share)
        # Slightly less than the excess: fractions such as 0.1 are not exact in binary.
        count = 0 if saved <= 0 else min(self.blocks, -int(-(over - 1e-6 * bytes_kept) // saved))
        self.recomputed = frozenset(number * self.blocks // count for number in range(count)) if count else frozenset()
        level = logging.WARNING if self.predicted_share > self.share + 1e-6 else logging.INFO
        _log.log(level, "%s", self)

    @property
    def predicted_share(self) -> float:
        """The fraction of activation bytes kept."""
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
    """The forward of one block: kept or recomputed, by the shared budget."""

    def __init__(self, forward: Callable[..., Any], recompute: Callable[..., Any], budget: Budget, number: int) -> None:
        self.forward, self.recompute, self.budget, self.number = forward, recompute, budget, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            # A kept block would fill the cache that the next, recomputed one must not append to twice.
            args, kwargs = without_empty_caches(args, kwargs)
        if self.budget.bytes_kept is None:
            held = HeldBytes()
            with held:
                out = self.forward(*args, **kwargs)
            outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            # A block's output is the next one's input, which is kept in either case.
            passed_on = sum(local_bytes(leaf) for leaf in outputs)
            self.budget.plan(held.count(outputs) + passed_on, passed_on)
            return out
        return (self.recompute if self.number in self.budget.recomputed else self.forward)(*args, **kwargs)


def budget_of(model: nn.Module) -> Budget | None:
    """Return the budget of a model's blocks, None without one."""
    for module in model.modules():
        forward: Any = module.__dict__.get("forward")
        while forward is not None:
            if isinstance(forward, KeepWithinBudget):
                return forward.budget
            forward = getattr(forward, "forward", None)
    return None
