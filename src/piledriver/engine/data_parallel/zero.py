"""What data-parallel processes share out: nothing, optimizer states, gradients, parameters (ZeRO, Rajbhandari, 2020).

| zero | parameters | gradients | optimizer state | how |
|---|---|---|---|---|
| 0 | whole | whole | whole | averaged in buckets (`averaging.py`) |
| 1 | whole | whole | 1 / N | the same; the optimizer steps on its rows (`parts.py`, `optimizers.py`) |
| 2 | whole | 1 / N | 1 / N | each process receives its rows of the mean only |
| 3 | 1 / N | 1 / N | 1 / N | torch's `fully_shard`, block by block |

N is dp_shard * cp. With dp_replicate, N processes share one copy and the copies are averaged across.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from piledriver.engine.blocks import blocks_of
from piledriver.engine.data_parallel.reducer import GradientReducer
from piledriver.engine.expert_parallel.apply import expert_modules
from piledriver.engine.failed_step import reset_failed_steps
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import Mesh
from piledriver.engine.offload.apply import offload_policy
from piledriver.engine.optimizer.shard_states import patch_zero_grad
from piledriver.engine.pipeline_parallel.split import stages_of
from piledriver.engine.precision import mixed_precision_policy
from piledriver.engine.shards import owned_rows as parts


def apply_zero(model: nn.Module, mesh: Mesh, layout: Layout) -> nn.Module:
    """Zero 3: parameters in 1 / N, gathered block by block while they are needed. Works on the meta device."""
    if layout.zero != 3 or mesh.alone or mesh.shard.size() == 1:
        return model
    options = {
        "mp_policy": mixed_precision_policy(layout),
        "offload_policy": offload_policy(layout, mesh.device_type),
    }
    for root in stages_of(model):
        _shard(root, mesh, options, layout.prefetch)
    return model


def _shard(root: nn.Module, mesh: Mesh, options: dict[str, Any], prefetch: int) -> None:
    for experts in expert_modules(root):
        fully_shard(experts, mesh=mesh.expert_shard, reshard_after_forward=True, **options)
    blocks = [block for block in blocks_of(root).values() if any(True for _ in block.parameters())]
    for block in blocks:
        fully_shard(block, mesh=mesh.shard, reshard_after_forward=True, **options)
    fully_shard(root, mesh=mesh.shard, **options)
    _prefetch(blocks, prefetch)
    if mesh.layout.pp == 1:
        reset_failed_steps(root)


def _prefetch(blocks: list[nn.Module], ahead: int) -> None:
    """Ask for the next blocks' parameters before this one computes. torch itself gathers one ahead on a GPU."""
    if ahead <= 1:
        return
    for i, block in enumerate(blocks):
        assert isinstance(block, FSDPModule)
        block.set_modules_to_forward_prefetch(_fsdp(blocks[i + 1 : i + 1 + ahead]))
        block.set_modules_to_backward_prefetch(_fsdp(blocks[max(i - ahead, 0) : i][::-1]))


def _fsdp(modules: list[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]


def attach_reducer(model: nn.Module, mesh: Mesh, layout: Layout) -> GradientReducer | None:
    """Zero 0, 1 and 2: average in every backward from now on. With zero 2 each process receives its rows only."""
    if layout.zero == 3 and not mesh.alone and mesh.shard.size() > 1:
        return None
    if mesh.alone or mesh.reduce_size == 1 or not any(p.requires_grad for p in model.parameters()):
        return None
    if layout.zero in (1, 2):
        for parameter in model.parameters():
            if not parts.local(parameter).is_contiguous():
                parameter.data = parameter.data.contiguous()
            parts.optimizer_shard(parameter, mesh)
        patch_zero_grad(model)
    return GradientReducer(model.parameters(), mesh, scatter=layout.zero == 2)
