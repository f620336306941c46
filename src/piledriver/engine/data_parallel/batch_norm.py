"""Batch-norm running statistics under data parallelism: every replica takes those of the first, as with torch DDP.

Each rank normalises its own part of a batch and gathers statistics of its own. The first rank's are broadcast after
every training forward, so evaluation agrees on all ranks and checkpoints do not depend on the rank that writes.
(Statistics over the whole batch are `torch.nn.SyncBatchNorm`'s, which a model can use as it is, on GPUs.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase

from piledriver.engine.errors import LayoutError
from piledriver.engine.mesh import Mesh


def attach_buffer_sync(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Broadcast the running statistics of the first replica after each training forward."""
    if not any(_tracks(module) for module in model.modules()):
        return model
    if mesh.layout.pp > 1:
        raise LayoutError(
            f"{type(model).__name__} keeps running statistics, which pipeline replicas do not share",
            fix=f"use norms without them (layer, RMS, group), or pp=1 for pp={mesh.layout.pp}",
        )
    model.register_forward_hook(_BroadcastFromFirst(mesh))
    return model


def remove_buffer_sync(model: nn.Module) -> None:
    """Undo `attach_buffer_sync`."""
    for key, hook in list(model._forward_hooks.items()):
        if isinstance(hook, _BroadcastFromFirst):
            del model._forward_hooks[key]


def _tracks(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and not isinstance(module, SyncBatchNorm) and module.running_mean is not None


class _BroadcastFromFirst:
    """Broadcasts from the first replica. A copy of the model is in no process group: its hook does nothing."""

    def __init__(self, mesh: Mesh | None) -> None:
        self.mesh = mesh

    def __call__(self, model: nn.Module, _args: Any, _output: Any) -> None:
        if self.mesh is None or not torch.is_grad_enabled():
            return
        held = [
            buffer
            for module in model.modules()
            if module.training and _tracks(module)
            for buffer in _statistics(module)
        ]
        for axis in self.mesh.dp_groups:
            group = axis.get_group()
            first = dist.get_global_rank(group, 0)
            work = [dist.broadcast(buffer, src=first, group=group, async_op=True) for buffer in held]
            for one in work:
                one.wait()

    def __deepcopy__(self, memo: Any) -> _BroadcastFromFirst:
        return _BroadcastFromFirst(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _BroadcastFromFirst, (None,)


def _statistics(module: nn.Module) -> list[Tensor]:
    # `.data`: this change must not count as one of the tensors that the backward saved.
    return [buffer.data for buffer in module.buffers(recurse=False)]
