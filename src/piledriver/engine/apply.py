"""The order in which a layout is applied: to a model, then to each of its optimizers.

Each step is a folder of its own; its function returns at once where the layout does not ask for it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from piledriver.engine.activations import apply_activation_checkpointing
from piledriver.engine.compile import apply_compile
from piledriver.engine.context_parallel import apply_cp
from piledriver.engine.data_parallel import apply_zero, attach_reducer, sync_buffers
from piledriver.engine.errors import LayoutError
from piledriver.engine.expert_parallel import apply_ep
from piledriver.engine.fp8 import apply_fp8
from piledriver.engine.fused import apply_fused
from piledriver.engine.mesh import Mesh
from piledriver.engine.offload import apply_offload, parameter_allocator
from piledriver.engine.optimizer.parameter_map import ParameterMap, swap_parameters
from piledriver.engine.options import EngineOptions
from piledriver.engine.pipeline_parallel import run_as_pipeline, split_stages, stages_of
from piledriver.engine.precision import apply_precision
from piledriver.engine.shards.tied_parameters import find_tied, retie
from piledriver.engine.state import EngineState, attach_state, is_on_meta
from piledriver.engine.tensor_parallel import apply_tp
from piledriver.optim import capabilities

Fill = Callable[[nn.Module], None]


def apply(
    model: nn.Module,
    mesh: Mesh,
    *,
    device: torch.device,
    weights: int | Fill = 0,
    options: EngineOptions | None = None,
) -> nn.Module:
    """Apply `mesh.layout` to a model, in place. All ranks call this together.

    A model on the meta device gets memory for its own shards only: `weights` is then the seed to initialise from, or a
    function that fills it (from a checkpoint). Other models start with the weights of rank 0 everywhere.
    """
    layout, options = mesh.layout, options or EngineOptions()
    tied = find_tied(model) if layout.pp == 1 else []
    plan = None
    if is_on_meta(model):
        from piledriver.engine.meta_init import init_plan

        plan = init_plan(model)
    elif not mesh.alone and layout.reducer != "ddp":
        _broadcast_from_rank_0(model)

    model = split_stages(model, mesh)
    model = apply_tp(model, mesh)
    model = apply_ep(model, mesh)
    model = apply_cp(model, mesh)
    model = apply_compute(model, mesh, options)
    # After this a tied weight is a parameter of its owning stage only.
    stages = stages_of(model, mesh)
    model = apply_zero(model, mesh)
    if plan is not None:
        from piledriver.engine.meta_init import materialise_shards

        home = torch.device("cpu") if layout.streams_parameters else device
        materialise_shards(model, plan, device, weights, home=home, allocate=parameter_allocator(model, mesh))
    reducer = attach_reducer(model, mesh, options.ddp)
    model = sync_buffers(model, mesh)
    model = apply_offload(model, mesh, device)
    if layout.reducer != "ddp":
        from piledriver.engine.optimizer.stochastic_rounding import assign_noise_ids

        assign_noise_ids(model)
    retie(model, tied)

    attach_state(model, EngineState(mesh, reducer, stages))
    run_as_pipeline(model, mesh, device)
    return model


def apply_compute(model: nn.Module, mesh: Mesh, options: EngineOptions) -> nn.Module:
    """Apply the steps that act on one replica alone: precision, fused operators, checkpointing, compilation.

    This is all that a model which is only evaluated needs.
    """
    model = apply_precision(model, mesh, options.autocast)
    model = apply_fused(model, mesh)
    model = apply_fp8(model, mesh)
    model = apply_activation_checkpointing(model, mesh)
    return apply_compile(model, mesh, options.compile)


def apply_optimizer(optimizer: torch.optim.Optimizer, mesh: Mesh, parameters: ParameterMap) -> None:
    """Apply `mesh.layout` to an optimizer, in place, after its models: its groups still hold their old parameters."""
    layout = mesh.layout
    swap_parameters(optimizer, parameters)
    if layout.reducer == "ddp":
        return
    from piledriver.engine.optimizer.local_step import step_locally
    from piledriver.engine.optimizer.shard_states import shard_states
    from piledriver.engine.optimizer.stochastic_rounding import round_stochastically

    _check_full_parameters(optimizer, mesh)
    if layout.offloads:
        from piledriver.engine.offload.apply import holds_rows, offload_optimizer

        if holds_rows(mesh):
            shard_states(optimizer, mesh)
        if offload_optimizer(optimizer):
            # Its stand-ins are local fp32 tensors already.
            return
    elif layout.zero in (1, 2) and not mesh.alone:
        shard_states(optimizer, mesh)
    if layout.has_bf16_weights:
        round_stochastically(optimizer)
    else:
        step_locally(optimizer)


def _check_full_parameters(optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
    layout = mesh.layout
    shards = layout.zero > 0 or layout.tp > 1 or layout.ep > 1
    if shards and not mesh.alone and capabilities(optimizer).needs_full_parameters:
        raise LayoutError(
            f"{type(optimizer).__name__} needs full parameters, and this layout shards them (zero={layout.zero}, "
            f"tp={layout.tp})",
            fix="use zero=0 with tp=1, or an elementwise optimizer such as AdamW",
        )


@torch.no_grad()
def _broadcast_from_rank_0(model: nn.Module) -> None:
    work = [dist.broadcast(tensor, src=0, async_op=True) for tensor in [*model.parameters(), *model.buffers()]]
    for one in work:
        one.wait()
