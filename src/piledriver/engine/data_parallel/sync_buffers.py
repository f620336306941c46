"""Running statistics (batch norm) under data parallelism: every process has those of the first, as with torch's DDP.

Each process normalises its own part of a batch, and would gather statistics of its own. After every training forward
the first one's are sent to the others: so evaluation gives the same everywhere, and a checkpoint does not depend on who
writes it. (Statistics of the whole batch are `torch.nn.SyncBatchNorm`'s, which a model can use as it is, on GPUs.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _NormBase

from piledriver.engine.errors import LayoutError
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import Mesh


def sync_buffers(model: nn.Module, mesh: Mesh, layout: Layout) -> nn.Module:
    """From now on all copies of a model have the running statistics of the first one; in place."""
    holders = [module for module in model.modules() if _tracks(module)]
    if mesh.alone or mesh.reduce_size == 1 or not holders:
        return model
    if layout.pp > 1:
        raise LayoutError(
            f"{type(model).__name__} keeps running statistics, which the copies of a pipeline do not share",
            fix=f"use norms without them (layer, RMS, group), or pp=1 for pp={layout.pp}",
        )
    model.register_forward_hook(_FromTheFirst(mesh))
    return model


def unsync_buffers(model: nn.Module) -> None:
    """Undo `sync_buffers`: the model is in no group any more."""
    for key, hook in list(model._forward_hooks.items()):
        if isinstance(hook, _FromTheFirst):
            del model._forward_hooks[key]


def _tracks(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and not isinstance(module, SyncBatchNorm) and module.running_mean is not None


class _FromTheFirst:
    """A copy of the model is in no group: it keeps to itself."""

    def __init__(self, mesh: Mesh | None) -> None:
        self.mesh = mesh

    def __call__(self, model: nn.Module, _args: Any, _output: Any) -> None:
        if self.mesh is None or not torch.is_grad_enabled():
            return
        held = [buffer for module in model.modules() if module.training and _tracks(module) for buffer in _of(module)]
        for axis in self.mesh.dp_groups:
            group = axis.get_group()
            first = dist.get_global_rank(group, 0)
            work = [dist.broadcast(buffer, src=first, group=group, async_op=True) for buffer in held]
            for one in work:
                one.wait()

    def __deepcopy__(self, memo: Any) -> _FromTheFirst:
        return _FromTheFirst(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _FromTheFirst, (None,)


def _of(module: nn.Module) -> list[Tensor]:
    # As data: the backward of this forward asks whether its inputs were changed, but not for these.
    return [buffer.data for buffer in module.buffers(recurse=False)]
