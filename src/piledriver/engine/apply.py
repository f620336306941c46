"""The one order in which a model is laid out. Each step is a file of its own that says what it does and why there."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from piledriver.engine.activations.checkpoint import apply_activation_checkpointing
from piledriver.engine.compile import apply_compile
from piledriver.engine.context_parallel.apply import apply_cp
from piledriver.engine.data_parallel import zero
from piledriver.engine.data_parallel.sync_buffers import sync_buffers
from piledriver.engine.expert_parallel.apply import apply_ep
from piledriver.engine.fp8.apply import apply_fp8
from piledriver.engine.marks import is_on_meta
from piledriver.engine.mesh import Mesh
from piledriver.engine.meta_init import init_plan, materialise
from piledriver.engine.offload.apply import apply_offload
from piledriver.engine.optimizer.stochastic_rounding import assign_noise_ids
from piledriver.engine.pipeline_parallel import split_stages, stages_of
from piledriver.engine.precision import apply_precision
from piledriver.engine.state import EngineState, attach_state
from piledriver.engine.tensor_parallel.apply import apply_tp

Fill = Callable[[nn.Module], None]


def apply(model: nn.Module, mesh: Mesh, *, device: torch.device, weights: int | Fill = 0) -> nn.Module:
    """Lay a model out as `mesh.layout` says, in place. All processes call this together.

    A model on the meta device gets its memory only once it is shared out: `weights` is then the seed to initialise it
    from, or a function that fills it (from a checkpoint). Other models start everywhere as they are on rank 0.
    """
    layout = mesh.layout
    recipe = init_plan(model) if is_on_meta(model) else None
    if recipe is None and not mesh.alone:
        _start_as_rank_0(model)

    model = split_stages(model, mesh, layout)
    model = apply_tp(model, mesh, layout)
    model = apply_ep(model, mesh, layout)
    model = apply_cp(model, mesh, layout)
    model = apply_precision(model, mesh, layout)
    model = apply_fp8(model, mesh, layout)
    model = apply_activation_checkpointing(model, mesh, layout)
    model = apply_compile(model, mesh, layout)
    # From here on the model shows a tied weight once, where it is owned.
    stages = stages_of(model)
    model = zero.apply_zero(model, mesh, layout)
    if recipe is not None:
        materialise(model, recipe, torch.device("cpu") if layout.offload == "parameters" else device, weights)
    reducer = zero.attach_reducer(model, mesh, layout)
    model = sync_buffers(model, mesh, layout)
    model = apply_offload(model, mesh, layout, device=device)
    assign_noise_ids(model)

    attach_state(model, EngineState(mesh, reducer, stages))
    if layout.pp > 1 and not mesh.alone:
        # torch's pipelining takes a second to import.
        from piledriver.engine.pipeline_parallel.model_call import run_as_pipeline

        run_as_pipeline(model, mesh, device)
    return model


@torch.no_grad()
def _start_as_rank_0(model: nn.Module) -> None:
    work = [dist.broadcast(tensor, src=0, async_op=True) for tensor in [*model.parameters(), *model.buffers()]]
    for one in work:
        one.wait()
