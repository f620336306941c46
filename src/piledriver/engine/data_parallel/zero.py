"""ZeRO 1 to 3: shard optimizer states, gradients and parameters over the data-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from piledriver.engine.blocks import blocks_of
from piledriver.engine.data_parallel.reducer import GradientReducer
from piledriver.engine.expert_parallel.apply import expert_modules
from piledriver.engine.faults.failed_step import reset_failed_steps
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import Mesh
from piledriver.engine.offload.apply import offload_policy, streams_shards
from piledriver.engine.optimizer.shard_states import patch_zero_grad
from piledriver.engine.pipeline_parallel.split import made_stages
from piledriver.engine.precision import compute_dtype
from piledriver.engine.shards.owned_rows import optimizer_shard
from piledriver.optim.shards import local


def shard_parameters(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Shard parameters in place; each block's are gathered while it computes. Works on the meta device."""
    options = {
        "mp_policy": _mixed_precision(mesh.layout),
        "offload_policy": offload_policy(mesh.layout, mesh.device_type),
    }
    for root in made_stages(model):
        _shard(root, mesh, options, mesh.layout.prefetch)
    return model


def _mixed_precision(layout: Layout) -> MixedPrecisionPolicy:
    """Gather parameters in the compute dtype, reduce gradients in fp32.

    Inputs are not cast: a block's input has its dtype from the block before.
    """
    dtype = compute_dtype(layout)
    if dtype is None:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    gathered = None if layout.has_bf16_weights else dtype
    return MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _shard(root: nn.Module, mesh: Mesh, options: dict[str, Any], prefetch: int) -> None:
    for experts in expert_modules(root):
        fully_shard(experts, mesh=mesh.expert_shard, reshard_after_forward=True, **options)
    blocks = [block for block in blocks_of(root).values() if any(True for _ in block.parameters())]
    for block in blocks:
        fully_shard(block, mesh=mesh.shard, reshard_after_forward=True, **options)
    fully_shard(root, mesh=mesh.shard, **options)
    if streams_shards(mesh.layout):
        _gather_on_time(blocks)
    else:
        _prefetch(blocks, prefetch)
    if mesh.layout.pp == 1:
        reset_failed_steps(root)


def _prefetch(blocks: list[nn.Module], ahead: int) -> None:
    """Gather the parameters of the next blocks before this one computes. torch itself gathers one ahead on a GPU."""
    if ahead <= 1:
        return
    for i, block in enumerate(blocks):
        assert isinstance(block, FSDPModule)
        block.set_modules_to_forward_prefetch(_fsdp(blocks[i + 1 : i + 1 + ahead]))
        block.set_modules_to_backward_prefetch(_fsdp(blocks[max(i - ahead, 0) : i][::-1]))


def _gather_on_time(blocks: list[nn.Module]) -> None:
    """Gather each block when it is needed: an all-gather ahead would wait on the host for a shard from disk."""
    for block in blocks:
        assert isinstance(block, FSDPModule)
        block.set_modules_to_backward_prefetch([block])


def _fsdp(modules: list[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]


def bucketed_reducer(model: nn.Module, mesh: Mesh) -> GradientReducer:
    """Zero 0, 1 and 2: average gradients in buckets. With zero 2 each rank receives the rows that it steps on."""
    layout = mesh.layout
    if layout.zero in (1, 2):
        for parameter in model.parameters():
            if not local(parameter).is_contiguous():
                parameter.data = parameter.data.contiguous()
            optimizer_shard(parameter, mesh)
        patch_zero_grad(model)
    return GradientReducer(model.parameters(), mesh, scatter=layout.zero == 2)
