"""A predicted layout through the real `engine.apply`, on a fake process group of the real size, in one process.

The model is built and placed on the meta device: every shard has its true shape, and no memory. The optimizer takes one
real step on these shards, so that its states are the ones it would hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from piledriver.engine.apply import apply, apply_optimizer
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import make_mesh
from piledriver.engine.optimizer.parameter_map import ParameterMap
from piledriver.models import Transformer
from piledriver.models.config import ModelConfig
from piledriver.optim import OptimizerConfig, build_optimizer
from piledriver.optim.shards import local
from piledriver.plan.blocks.parameters import stages_by_rank, stages_of_layout
from piledriver.plan.errors import PlanError
from piledriver.plan.memory.state_bytes import StateBytes
from piledriver.plan.memory.states import stage_total
from piledriver.plan.prediction import Prediction

_GIB = 2**30
# Agreement that the prediction promises.
TOLERANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class EngineBytes:
    """Bytes of one rank as the engine placed them."""

    weights: float
    gradients: float
    states: float


def engine_bytes(
    config: ModelConfig, layout: Layout, *, world_size: int, rank: int = 0, optimizer: str = "adamw"
) -> EngineBytes:
    """Return the bytes of weights, gradients and optimizer states of one rank, as `engine.apply` places them."""
    if layout.offloads:
        raise PlanError(f"offload {layout.offload!r} needs real memory", fix="check the layout with offload='none'")
    with torch.device("meta"):
        model = Transformer(config)
    made = build_optimizer(model, OptimizerConfig(kind=optimizer, lr=1e-3))
    with fake_world(world_size, rank):
        mesh = make_mesh(replace(layout, compile=False, dp_replicate=None, dp_shard=layout.dp_shard), "cpu")
        before = dict(model.named_parameters())
        apply(model, mesh, device=torch.device("meta"), weights=_leave)
        mapped = ParameterMap()
        mapped.replaced.update({old: new for name, new in model.named_parameters() if (old := before[name]) is not new})
        gone = [old for name, old in before.items() if name not in dict(model.named_parameters())]
        for group in made.param_groups:
            group["params"] = [one for one in group["params"] if not any(one is old for old in gone)]
        apply_optimizer(made, mesh, mapped)
        held = [parameter for group in made.param_groups for parameter in group["params"]]
        weights = sum(_bytes(parameter) for parameter in model.parameters())
        gradients = _gradient_bytes(model, mesh.layout)
        states = _state_bytes(made, held)
    return EngineBytes(weights=weights, gradients=gradients, states=states)


def compare_with_engine(one: Prediction) -> str:
    """Return a line that compares a prediction with the engine's placement; raises `PlanError` if they differ."""
    layout, count = one.layout, one.cluster.count
    found = engine_bytes(one.workload.config, layout, world_size=count, rank=0, optimizer=one.workload.optimizer)
    stages = stages_of_layout(one.workload.config, layout)
    own = [stages[index] for index in stages_by_rank(layout)[0]]
    said = sum((stage_total(one.workload.config, stage, layout, one.workload.optimizer) for stage in own), StateBytes())
    pairs = {
        "weights": (said.weights, found.weights),
        "gradients": (said.gradients, found.gradients),
        "states": (said.states, found.states),
    }
    for name, (predicted, placed) in pairs.items():
        if abs(predicted - placed) > TOLERANCE * max(placed, 1.0):
            raise PlanError(
                f"{name} of rank 0 are predicted as {predicted / _GIB:.3f} GiB, but the engine placed "
                f"{placed / _GIB:.3f} GiB",
                fix="report this layout: the planner's arithmetic is wrong for it",
            )
    text = ", ".join(f"{name} {placed / _GIB:.2f} GiB" for name, (_, placed) in pairs.items())
    return f"engine on {count} fake ranks agrees: {text} on rank 0"


@contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Connect this process to `size` ranks that do not exist, within the block."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise PlanError("this process is in a process group already", fix="check layouts outside a training process")
    if size == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _leave(_model: nn.Module) -> None:
    """Fill nothing: meta tensors have no values."""


def _bytes(tensor: torch.Tensor) -> float:
    part = local(tensor.detach())
    return float(part.numel() * part.element_size())


def _gradient_bytes(model: nn.Module, layout: Layout) -> float:
    total = 0.0
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        shard = getattr(parameter, "optimizer_shard", None)
        total += _bytes(shard if layout.zero == 2 and shard is not None else parameter)
    return total


def _state_bytes(optimizer: torch.optim.Optimizer, held: list[torch.Tensor]) -> float:
    """Take one step on local meta tensors, and count what the optimizer keeps."""
    for group in optimizer.param_groups:
        parts = []
        for parameter in group["params"]:
            part = torch.empty_like(local(parameter.detach()), device="meta").requires_grad_()
            part.grad = torch.empty_like(part)
            parts.append(part)
        group["params"] = parts
        if "fused" in group:
            group["fused"], group["foreach"] = False, False
    optimizer._optimizer_step_pre_hooks.clear()
    optimizer._optimizer_step_post_hooks.clear()
    type(optimizer).step(optimizer)
    tensors = [value for state in optimizer.state.values() for value in state.values()]
    return sum(float(one.numel() * one.element_size()) for one in tensors if isinstance(one, torch.Tensor))
