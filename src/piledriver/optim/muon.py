"""Muon for hidden matrices and AdamW for everything else, in one optimizer object.

Muon replaces the momentum of a matrix by the nearest orthogonal matrix (Jordan et al., 2024), found by a few
Newton-Schulz iterations. For two-dimensional parameters the result equals `torch.optim.Muon`'s; stacked experts count
as separate matrices, and a sharded matrix is all-gathered for the iteration.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from piledriver.core.errors import UsageError
from piledriver.kernels.masked_copy import masked_copy_
from piledriver.kernels.newton_schulz import orthogonalise
from piledriver.optim.adamw.fused import adamw_update
from piledriver.optim.conditional_step import call_closure, skip_flag
from piledriver.optim.groups import Params
from piledriver.optim.shards import like, local, local_gradient

MATRICES_TOGETHER = 8
"""Matrices of one shape that are gathered and iterated on at a time: bounds the memory."""


class Muon(Optimizer):
    """Groups whose `kind` is `matrix` (as `parameter_groups` makes them, or without a kind) get Muon, others AdamW.

    `adjust` scales the learning rate by shape: `original` by sqrt(rows / columns), or `match_rms_adamw`, so that one
    learning rate suits both halves (Liu et al., 2025). `dtype` is that of the iteration, by default bf16 on a GPU and
    fp32 elsewhere: in bf16 the last bit of a gradient can change a direction of small singular value, so use fp32 for
    runs that must be compared.
    """

    per_parameter = True
    skips_on_device = True

    def __init__(
        self,
        params: Params,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        steps: int = 5,
        adjust: Literal["original", "match_rms_adamw"] = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        dtype: torch.dtype | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "newton_schulz_steps": steps,
            "adjust": adjust,
            "betas": betas,
            "eps": eps,
            "kind": "matrix",
        }
        super().__init__(params, defaults)
        self._dtype = dtype
        for group in self.param_groups:
            flat = [parameter for parameter in group["params"] if parameter.dim() < 2]
            if group["kind"] == "matrix" and flat:
                raise UsageError(
                    f"Muon was given a parameter of shape {tuple(flat[0].shape)}",
                    fix="make the groups with parameter_groups, or give that one kind='vector'",
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on every parameter that has a gradient."""
        loss, skip = call_closure(closure), skip_flag(self)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["kind"] == "matrix":
                self._muon(parameters, group, skip)
            else:
                adamw_update(parameters, self.state, group, skip)
        return loss

    def _muon(self, parameters: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        for together in _batches(parameters):
            # A function of its own, so that nothing of one batch is alive while the next is stacked.
            self._muon_together(together, group, skip)

    def _muon_together(self, together: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> None:
        """Step on matrices of one shape."""
        momenta = self._stacked_momenta(together, group, skip)
        turned = orthogonalise(momenta, steps=group["newton_schulz_steps"], dtype=momenta.dtype)
        rows, columns = together[0].shape[-2:]
        is_original = group["adjust"] == "original"
        adjustment = math.sqrt(max(1.0, rows / columns)) if is_original else 0.2 * math.sqrt(max(rows, columns))
        for parameter, update in zip(together, turned, strict=True):
            weight = local(parameter)
            moved = weight if skip is None else weight.clone()
            moved.mul_(1.0 - group["lr"] * group["weight_decay"])
            moved.add_(_share(update, parameter), alpha=-group["lr"] * adjustment)
            if skip is not None:
                masked_copy_(weight, moved, skip)

    def _stacked_momenta(self, together: list[Tensor], group: dict[str, Any], skip: Tensor | None) -> Tensor:
        """Return the momenta of full matrices as one tensor, in the dtype of the iteration."""
        momenta = [self._momentum(parameter, group, skip) for parameter in together]
        first = momenta[0]
        dtype = self._dtype or (torch.bfloat16 if first.is_cuda else torch.float32)
        stacked = torch.empty(len(momenta), *first.shape, dtype=dtype, device=first.device)
        torch._foreach_copy_(stacked.unbind(), momenta)
        return stacked

    def _momentum(self, parameter: Tensor, group: dict[str, Any], skip: Tensor | None) -> Tensor:
        """Return the (Nesterov) momentum of the full matrix."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient, kept = local_gradient(parameter), local(state["momentum_buffer"])
        buffer = kept if skip is None else kept.clone()
        buffer.lerp_(gradient, 1.0 - group["momentum"])
        if skip is not None:
            masked_copy_(kept, buffer, skip)
        update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
        whole = like(parameter, update)
        return whole.full_tensor() if isinstance(whole, DTensor) else whole


def _batches(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Group matrices of one shape on a GPU, which utilises it better; elsewhere one at a time."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for parameter in parameters:
        by_shape.setdefault(parameter.shape, []).append(parameter)
    size = MATRICES_TOGETHER if parameters and parameters[0].is_cuda else 1
    return [alike[i : i + size] for alike in by_shape.values() for i in range(0, len(alike), size)]


def _share(update: Tensor, parameter: Tensor) -> Tensor:
    if isinstance(parameter, DTensor):
        # Every rank computed the same matrix and keeps its shard, so nothing is communicated.
        return local(distribute_tensor(update, parameter.device_mesh, parameter.placements, src_data_rank=None))
    return update
