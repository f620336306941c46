"""The one order in which a model is laid out. Each step is a file; each says in its docstring why it stands here."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from piledriver.engine import zero
from piledriver.engine.laid_out import LaidOut, remember
from piledriver.engine.materialise import Recipe, fill, is_on_meta, recipe_of
from piledriver.engine.mesh import Meshes

Fill = Callable[[nn.Module], None]


def apply(model: nn.Module, meshes: Meshes, *, device: torch.device, weights: int | Fill = 0) -> nn.Module:
    """Lay a model out, in place. All processes call this together.

    A model on the meta device gets its memory only once it is shared out: `weights` is then the seed to initialise it
    from, or a function that fills it (from a checkpoint). Other models start everywhere as on rank 0.
    """
    layout = meshes.layout
    recipe: Recipe | None = recipe_of(model) if is_on_meta(model) else None
    if recipe is None and not meshes.alone:
        _start_as_rank_0(model)
    model = zero.shard_parameters(model, meshes, layout)
    if recipe is not None:
        fill(model, recipe, device, weights)
    averager = zero.average_gradients(model, meshes, layout)
    remember(model, LaidOut(meshes, averager))
    return model


@torch.no_grad()
def _start_as_rank_0(model: nn.Module) -> None:
    work = [dist.broadcast(tensor, src=0, async_op=True) for tensor in [*model.parameters(), *model.buffers()]]
    for one in work:
        one.wait()
