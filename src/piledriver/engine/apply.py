"""The one order in which a model is laid out. Each step is a file of its own that says what it does and why there."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from piledriver.engine.activations.checkpoint import save_activations
from piledriver.engine.compile import compile_blocks
from piledriver.engine.context_parallel.apply import split_sequences
from piledriver.engine.data_parallel import zero
from piledriver.engine.data_parallel.sync_buffers import share_statistics
from piledriver.engine.expert_parallel.apply import spread_experts
from piledriver.engine.fp8.apply import use_fp8
from piledriver.engine.marks import is_on_meta
from piledriver.engine.mesh import Meshes
from piledriver.engine.meta_init import fill, recipe_of
from piledriver.engine.offload.apply import offload_model
from piledriver.engine.optimizer.stochastic_rounding import name_noise
from piledriver.engine.pipeline_parallel import split, stages_of
from piledriver.engine.precision import compute_in
from piledriver.engine.state import LaidOut, remember
from piledriver.engine.tensor_parallel.apply import split_tensors

Fill = Callable[[nn.Module], None]


def apply(model: nn.Module, meshes: Meshes, *, device: torch.device, weights: int | Fill = 0) -> nn.Module:
    """Lay a model out as `meshes.layout` says, in place. All processes call this together.

    A model on the meta device gets its memory only once it is shared out: `weights` is then the seed to initialise it
    from, or a function that fills it (from a checkpoint). Other models start everywhere as they are on rank 0.
    """
    layout = meshes.layout
    recipe = recipe_of(model) if is_on_meta(model) else None
    if recipe is None and not meshes.alone:
        _start_as_rank_0(model)

    model = split(model, meshes, layout)
    model = split_tensors(model, meshes, layout)
    model = spread_experts(model, meshes, layout)
    model = split_sequences(model, meshes, layout)
    model = compute_in(model, meshes, layout)
    model = use_fp8(model, meshes, layout)
    model = save_activations(model, meshes, layout)
    model = compile_blocks(model, meshes, layout)
    # From here on the model shows a tied weight once, where it is owned.
    stages = stages_of(model)
    model = zero.shard_parameters(model, meshes, layout)
    if recipe is not None:
        fill(model, recipe, torch.device("cpu") if layout.offload == "parameters" else device, weights)
    averager = zero.average_gradients(model, meshes, layout)
    model = share_statistics(model, meshes, layout)
    model = offload_model(model, meshes, layout, device=device)
    name_noise(model)

    remember(model, LaidOut(meshes, averager, stages))
    if layout.pp > 1 and not meshes.alone:
        # torch's pipelining takes a second to import.
        from piledriver.engine.pipeline_parallel.model_call import run_as_pipeline

        run_as_pipeline(model, meshes, device)
    return model


@torch.no_grad()
def _start_as_rank_0(model: nn.Module) -> None:
    work = [dist.broadcast(tensor, src=0, async_op=True) for tensor in [*model.parameters(), *model.buffers()]]
    for one in work:
        one.wait()
