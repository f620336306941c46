"""Expert parallelism: shard experts over ep, and dispatch tokens to them by all-to-all.

Outputs, losses and gradients equal one process if nothing is dropped; so does the load-balance loss, whose fractions
and probabilities are averaged over the tokens of all data-parallel ranks in one forward.

Gradients of experts are sums over ep, to be divided by all ranks that read data (`Mesh.reduce_size`). Our reducer does
that; `fully_shard` divides by the ranks that shard one expert, so with zero 3 they are divided by ep first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from piledriver.engine.errors import LayoutError
from piledriver.engine.expert_parallel.token_dispatch import CapacityDispatcher, DroplessDispatcher
from piledriver.engine.mesh import Mesh
from piledriver.engine.shards.collectives import Group, all_reduce_sum
from piledriver.engine.shards.local_params import ScaleGradient, part, place_parameter
from piledriver.engine.shards.owned_rows import is_expert
from piledriver.engine.tensor_parallel.transformer import ExpertTensorParallel
from piledriver.models.feed_forward.moe import Experts, MoE
from piledriver.models.quantised import QuantisedExperts

_TP_DIM = {"gate_up": 1, "down": 2, "gate_up_bias": 1}
"""The dimension of each stacked weight that tp shards: the width of the expert."""


def shard_experts(model: nn.Module, mesh: Mesh) -> nn.Module:
    """Shard the experts of a `Transformer` over ep, in place; average the balance loss over data-parallel ranks."""
    layout = mesh.layout
    mixtures = [module for module in model.modules() if isinstance(module, MoE)]
    if not mixtures:
        return _without_own_mixtures(model, mesh)
    if layout.ep > 1 and any(isinstance(mixture.experts, QuantisedExperts) for mixture in mixtures):
        raise LayoutError("ep does not shard quantised experts", fix="shard the dense model, or use ep=1")
    check_ep_divisible(mixtures[0].router.settings.experts, layout.ep)
    if not mesh.alone and mesh.reduce_size > 1:
        average = MeanOverData(_data_groups(mesh))
        for mixture in mixtures:
            mixture.router.average = average
    if layout.ep == 1 and layout.expert_capacity is None:
        return model
    if layout.expert_capacity is not None and mixtures[0].down_bias is not None:
        raise LayoutError(
            f"expert_capacity {layout.expert_capacity}, but experts with biases add them to dropped choices too",
            fix="leave out expert_capacity",
        )
    group = Group("", 1, 0) if layout.ep == 1 or mesh.alone else Group.of(mesh.ep)
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for mixture in mixtures:
        if group.size > 1:
            _place(mixture.experts, mesh, placed)
        _set_dispatcher(
            mixture,
            DroplessDispatcher(group)
            if layout.expert_capacity is None
            else CapacityDispatcher(group, layout.expert_capacity),
        )
    return model


def _without_own_mixtures(model: nn.Module, mesh: Mesh) -> nn.Module:
    layout = mesh.layout
    if layout.ep == 1 and layout.expert_capacity is None:
        return model
    from piledriver.engine.expert_parallel.huggingface import shard_stacked_experts, stacked_experts

    found = stacked_experts(model)
    if found:
        check_ep_divisible(found[0].num_experts, layout.ep)
        group = Group("", 1, 0) if layout.ep == 1 or mesh.alone else Group.of(mesh.ep)
        shard_stacked_experts(found, mesh, group)
    elif layout.ep > 1 and layout.pp == 1:
        # A pipeline stage without blocks of its own has no experts either.
        raise LayoutError(
            f"ep {layout.ep}, but {type(model).__name__} has neither `MoE` layers nor stacked experts of transformers",
            fix="use ep=1",
        )
    return model


def _data_groups(mesh: Mesh) -> list[Group]:
    return [Group.of(axis) for axis in mesh.dp_groups] if mesh.dense is not None else [Group.world()]


def check_ep_divisible(experts: int, ep: int) -> None:
    """Raise `LayoutError` if ep does not divide the experts."""
    if experts % ep:
        nearest = max(n for n in range(1, min(ep, experts) + 1) if experts % n == 0)
        raise LayoutError(f"ep {ep} does not divide the {experts} experts", fix=f"use ep={nearest}")


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose parameters are sharded over ep; ZeRO shards them over `mesh.expert_shard`."""
    return [module for module in model.modules() if any(is_expert(p) for p in module.parameters(recurse=False))]


def dropped_choices(model: nn.Module) -> tuple[int, int]:
    """Return how many (token, expert) choices `expert_capacity` dropped on this rank so far, and how many were made."""
    dispatchers = map(_dispatcher_of, model.modules())
    counters = [one.counter for one in dispatchers if isinstance(one, CapacityDispatcher)]
    counted = [counter.tolist() for counter in counters if counter is not None]
    return sum(dropped for dropped, _ in counted), sum(choices for _, choices in counted)


class MeanOverData:
    """Averages over the ranks that hold different tokens; gradients are averaged too."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups

    def __call__(self, x: Tensor) -> Tensor:
        for group in self.groups:
            x = all_reduce_sum(x, group) / group.size
        return x


def _place(experts: Experts, mesh: Mesh, placed: dict[nn.Parameter, nn.Parameter]) -> None:
    layout = mesh.layout
    reader = ScaleGradient(1 / layout.ep) if layout.zero == 3 else part
    expert_mesh: DeviceMesh = mesh.experts["ep", "tp"] if layout.tp > 1 else mesh.ep
    for name, dim in _TP_DIM.items():
        placements: list[Placement] = [Shard(0), Shard(dim)] if layout.tp > 1 else [Shard(0)]
        place_parameter(experts, name, expert_mesh, placements, placed, reader)


def _set_dispatcher(mixture: MoE, dispatcher: Callable[..., Tensor]) -> None:
    """Replace the dispatch, inside of `ExpertTensorParallel` where tp shards each expert."""
    if isinstance(mixture.dispatch, ExpertTensorParallel):
        mixture.dispatch.inner = dispatcher
    else:
        mixture.dispatch = dispatcher


def _dispatcher_of(module: nn.Module) -> Any:
    dispatcher = getattr(module, "dispatch", None)
    return dispatcher.inner if isinstance(dispatcher, ExpertTensorParallel) else dispatcher
