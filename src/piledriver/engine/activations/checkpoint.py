"""Activation checkpointing: keep all, keep expensive ops, recompute blocks, or recompute to fit a memory budget.

Each block's `forward` is replaced by a callable object on the same module: parameter names and state dict keys stay,
and a deep copy of the model uses its own weights. Gradients are bit for bit those of keeping all, dropout included.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from piledriver.engine.activations.budget import Budget, KeepWithinBudget
from piledriver.engine.activations.offload import ActivationStore, KeepOnHost
from piledriver.engine.blocks import blocks_of
from piledriver.engine.compile import is_compiled
from piledriver.engine.errors import LayoutError
from piledriver.engine.hf_kv_cache import refuse_caches, without_empty_caches
from piledriver.engine.mesh import Mesh
from piledriver.kernels import ops_to_save
from piledriver.models.block import Block

# Operators whose outputs selective checkpointing keeps, beside those that the kernels name (attention, fp8 layers).
# The rest is elementwise and reductions, which are cheap to recompute.
_OPS_TO_SAVE = frozenset(
    {
        *(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")),
        *(f"aten::{name}" for name in ("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")),
        "_c10d_functional::reduce_scatter_tensor",
        "_c10d_functional::all_to_all_single",
        "_c10d_functional::all_reduce",
    }
)


def checkpoint_blocks(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Make the blocks of a model keep, recompute or offload activations as the layout says, in place."""
    layout = mesh.layout
    for module in model.modules() if layout.recompute_norms else ():
        if isinstance(module, Block):
            module.recompute_norms = True
    if layout.activations == "keep" and not layout.activation_offload:
        return model
    blocks = list(blocks_of(model).values())
    if not blocks:
        raise LayoutError(
            f"{type(model).__name__} has no repeated blocks whose activations could be recomputed",
            fix="use activations='keep', or put the repeated modules in a ModuleList",
        )
    _recompute(model, blocks, mesh)
    if layout.activation_offload:
        store = ActivationStore()
        # The backward begins with the last block, whose activations would be needed at once.
        for number, block in enumerate(blocks[:-1]):
            block.forward = KeepOnHost(block.forward, store, first=number == 0)
    return model


def _recompute(model: nn.Module, blocks: list[nn.Module], mesh: Mesh) -> None:
    layout = mesh.layout
    if layout.activations == "budget" and is_compiled(mesh):
        return  # The compiler chooses operators by the budget; see `compile_modules`.
    if layout.activations == "budget":
        budget = Budget(share=layout.activation_budget, blocks=len(blocks))
        for number, block in enumerate(blocks):
            block.forward = KeepWithinBudget(block.forward, Recompute(block.forward), budget, number)
    elif layout.activations != "keep":
        for block in blocks[:: layout.activation_every]:
            block.forward = Recompute(block.forward, selective=layout.activations == "selective")


class Recompute:
    """A forward that is recomputed in the backward; with `selective`, without its expensive operators."""

    def __init__(self, forward: Callable[..., Any], *, selective: bool = False) -> None:
        self.forward = forward
        self.options: dict[str, Any] = {}
        if selective:
            policy = functools.partial(save_expensive_ops, _OPS_TO_SAVE | ops_to_save())
            self.options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if not torch.compiler.is_compiling():
            args, kwargs = without_empty_caches(args, kwargs)
            refuse_caches(args, kwargs)
        return checkpoint(self.forward, *args, use_reentrant=False, **self.options, **kwargs)


def save_expensive_ops(
    names: frozenset[str], _context: Any, operator: Any, *_args: Any, **_kwargs: Any
) -> CheckpointPolicy:
    """Return whether to keep an operator's output or to recompute it."""
    kept = operator.name().split(".")[0] in names
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
