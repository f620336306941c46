"""Tied embeddings across a pipeline: the first stage owns the weight, the last stage holds a copy.

The weight is sent before a batch, and the copy's gradient is returned and added after it: the optimizer, gradient norm
and checkpoints see the weight once. Each rank exchanges its shard with its peer of the other stage.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from piledriver.engine.errors import EngineError
from piledriver.engine.layout import Layout
from piledriver.engine.mesh import Mesh
from piledriver.engine.pipeline_parallel.split import ends, pipeline_split


class TiedWeightSync:
    """Keeps the tied weights of a pipeline in sync; does nothing for models without them."""

    def __init__(self, model: nn.Module, stages: dict[int, nn.Module], mesh: Mesh, layout: Layout) -> None:
        known = pipeline_split(model)
        assert known is not None
        self.group = mesh.pp.get_group()
        first, last = ends(layout)
        self.first, self.last = (dist.get_global_rank(self.group, rank) for rank in (first, last))
        self.me = dist.get_rank()
        borrows = known.chain.borrows
        self.owned = [model.get_submodule(name) for name in borrows.values()] if self.me == self.first else []
        last_stage = stages.get(layout.stages - 1)
        self.borrowed = [] if last_stage is None else [last_stage.get_submodule(name) for name in borrows]

    def materialise(self, device: torch.device) -> None:
        """Allocate the copies of a model built on the meta device."""
        for module in self.borrowed:
            if any(parameter.is_meta for parameter in module.parameters()):
                module.to_empty(device=device)

    def cast(self, dtype: torch.dtype | None) -> None:
        """Hold the copies in the dtype of weights whose fp32 masters are offloaded; None: as they are."""
        for module in self.borrowed:
            weight: Any = module.weight
            if dtype is not None and not isinstance(weight, DTensor):
                weight.data = weight.data.to(dtype)

    @torch.no_grad()
    def send_weights(self) -> None:
        """Send the weights to the last stage."""
        self._pass([_local(m.weight) for m in self.owned], [_local(m.weight) for m in self.borrowed], back=False)

    @torch.no_grad()
    def return_gradients(self) -> None:
        """Send the copies' gradients to the first stage and add them there."""
        gradients = [self._gradient(module.weight) for module in self.borrowed]
        room = [torch.zeros_like(_local(module.weight)) for module in self.owned]
        self._pass(gradients, room, back=True)
        for module, came in zip(self.owned, room, strict=True):
            weight: Any = module.weight
            if not weight.requires_grad:
                continue
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            _local(weight.grad).add_(came)
        for module in self.borrowed:
            module.weight.grad = None

    def gradients(self) -> list[Tensor]:
        """Return the copies' gradients that were not returned yet; copies are not parameters of the model."""
        weights: list[Any] = [module.weight for module in self.borrowed]
        return [weight.grad for weight in weights if weight.grad is not None]

    def _pass(self, out: list[Tensor], into: list[Tensor], *, back: bool) -> None:
        if self.first == self.last:
            for source, target in zip(out, into, strict=True):
                _fits(source, target)
                target.copy_(source)
            return
        sender, receiver = (self.last, self.first) if back else (self.first, self.last)
        if self.me == sender:
            for tensor in out:
                dist.send(tensor.contiguous(), receiver, group=self.group)
        if self.me == receiver:
            for tensor in into:
                dist.recv(tensor, sender, group=self.group)

    @staticmethod
    def _gradient(weight: Any) -> Tensor:
        if weight.grad is None:
            return torch.zeros_like(_local(weight))
        if isinstance(weight.grad, DTensor) and weight.grad.placements != weight.placements:
            return weight.grad.redistribute(weight.device_mesh, weight.placements).to_local()
        return _local(weight.grad)


def _fits(source: Tensor, target: Tensor) -> None:
    if source.shape != target.shape:
        raise EngineError(
            f"a tied weight has local shape {tuple(source.shape)} in one stage, {tuple(target.shape)} in the other",
            fix="shard the embedding and the output layer alike",
        )


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
