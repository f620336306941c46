"""Expert parallelism of `transformers`' mixtures: their stacked experts, sharded and dispatched to as our own.

Router and weights of the choices stay the model's. A balance loss that it computes (`output_router_logits`) is that of
each rank's tokens, as under any data parallelism of `transformers`.
"""

from __future__ import annotations

import types
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Shard

from piledriver.engine.errors import LayoutError
from piledriver.engine.expert_parallel.token_dispatch import CapacityDispatcher, DroplessDispatcher
from piledriver.engine.fused.experts import apply_stacked, is_experts, match_experts
from piledriver.engine.fused.plain import in_autocast
from piledriver.engine.mesh import Mesh
from piledriver.engine.shards.collectives import Group
from piledriver.engine.shards.local_params import ScaleGradient, part, place_parameter
from piledriver.models.feed_forward.moe import Routing


class StackedExperts:
    """The experts of a module, all or this rank's, as dispatchers call them."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.count: int = module.num_experts

    @property
    def training(self) -> bool:
        """Whether the module trains: a capacity applies only then."""
        return bool(self.module.training)

    def __call__(self, rows: Tensor, ends: Tensor) -> Tensor:
        return apply_stacked(self.module, rows, ends)


def stacked_experts(model: nn.Module) -> list[Any]:
    """Return the modules of a model that hold stacked experts."""
    return [module for module in model.modules() if is_experts(module)]


def shard_stacked_experts(experts: list[Any], mesh: Mesh, group: Group) -> None:
    """Shard stacked experts over ep, in place. Each kind is compared with its replacement on a small input first."""
    layout = mesh.layout
    if layout.tp > 1 or layout.pp > 1:
        raise LayoutError(
            f"ep {layout.ep} of transformers' experts with tp {layout.tp}, pp {layout.pp}", fix="use tp=1 and pp=1"
        )
    if not any(weight.is_meta for weight in experts[0].parameters()):
        device = experts[0].gate_up_proj.device
        forward, why = match_experts(experts[0], device)
        if forward is None:
            raise LayoutError(f"ep {layout.ep} of {type(experts[0]).__name__}: {why}", fix="use ep=1")
    if layout.expert_capacity is not None and experts[0].has_bias:
        raise LayoutError(
            f"expert_capacity {layout.expert_capacity}, but {type(experts[0]).__name__} has biases",
            fix="leave out expert_capacity",
        )
    reader = ScaleGradient(1 / layout.ep) if layout.zero == 3 else part
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for module in experts:
        names = list(module._parameters) if group.size > 1 else []
        for name in names:
            place_parameter(module, name, mesh.ep, [Shard(0)], placed, reader)
        module.dispatch = (
            DroplessDispatcher(group)
            if layout.expert_capacity is None
            else CapacityDispatcher(group, layout.expert_capacity)
        )
        module.forward = types.MethodType(dispatched_forward, module)


def dispatched_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts, wherever they are. The signature is that of `transformers`."""
    routing = Routing(top_k_index, top_k_weights, top_k_weights.new_zeros(()))
    out: Tensor = module.dispatch(StackedExperts(module), in_autocast(hidden_states), routing)
    return out.to(hidden_states.dtype)
