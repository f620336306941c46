"""AdamW with split master weights: bf16 weights in the model, the lower 16 bits of each fp32 weight as a state.

bf16 is the upper half of fp32, so both halves are the fp32 master weight, bit for bit, in 4 bytes; a master weight and
its bf16 copy take 6. Gradients are bf16. Weights, gradients and states take 14 bytes per parameter with fp32 moments
and 10 with bf16 moments, which are rounded stochastically. fp32 weights have no second half. Gradients are clipped
while the step reads them.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from piledriver.kernels.registry import fastest_kernel
from piledriver.kernels.rounding import join_fp32
from piledriver.optim.adamw.numbered import Due, NumberedAdamW, first_index
from piledriver.optim.groups import Params
from piledriver.optim.shards import like, local, local_gradient

Moments = Literal["fp32", "bf16"]


class SplitMasterAdamW(NumberedAdamW):
    """AdamW with exact fp32 updates, where the model holds the upper half of each weight.

    >>> weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    >>> optimizer = SplitMasterAdamW([weight], lr=1e-4, weight_decay=0.0)
    >>> for _ in range(5):
    ...     weight.grad = torch.ones_like(weight)
    ...     optimizer.step()
    >>> weight[0].item(), round(optimizer.master(weight)[0].item(), 6)  # bf16 alone would never move
    (1.0, 0.9995)
    """

    clips_in_step = True

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        moments: Moments = "fp32",
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed}
        super().__init__(params, {**defaults, "moments": moments})
        self._factors: dict[torch.device, Tensor] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._factors = {}

    def clip(self, factor: Tensor) -> None:
        """Scale gradients by this factor while the next step reads them; the gradients themselves do not change."""
        self._factors = {factor.device: factor}

    def master(self, parameter: Tensor) -> Tensor:
        """Return the fp32 weight of a parameter (of its local shard)."""
        weight, state = local(parameter).detach(), self.state[parameter]
        return join_fp32(weight, local(state["low"])) if "low" in state else weight.float()

    def _update_all(self, due: Due) -> None:
        super()._update_all(due)
        self._factors = {}

    def _update(self, parameter: Tensor, group: dict[str, Any], noise_offset: int) -> None:
        state, weight = self.state[parameter], local(parameter)
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        fastest_kernel("adamw", weight.device)(
            weight,
            local(state["low"]) if "low" in state else None,
            local_gradient(parameter).contiguous(),
            local(state["exp_avg"]),
            local(state["exp_avg_sq"]),
            self._factor(weight.device),
            (lr, 1.0 - lr * group["weight_decay"], beta1, beta2, group["eps"]),
            self._counter.constants(parameter),
            first_index(parameter),
            noise_offset & 0x7FFFFFFF,
        )
        increment_version(parameter)

    def _factor(self, device: torch.device) -> Tensor:
        if device not in self._factors:
            known = next(iter(self._factors.values()), None)
            self._factors[device] = torch.ones((), device=device) if known is None else known.to(device)
        return self._factors[device]

    def _begin(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, part = self.state[parameter], local(parameter)
        if part.dtype == torch.bfloat16:
            state["low"] = like(parameter, torch.zeros_like(part, dtype=torch.int16))
        # Vectors are small: they keep fp32 moments.
        dtype = torch.bfloat16 if group["moments"] == "bf16" and part.dim() > 1 else torch.float32
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = like(parameter, torch.zeros_like(part, dtype=dtype))


adamw_split_bf16 = functools.partial(SplitMasterAdamW, moments="bf16")
