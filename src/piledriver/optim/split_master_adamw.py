"""AdamW with split master weights: bf16 weights in the model, the lower 16 bits of each fp32 weight as a state.

bf16 is the upper half of fp32, so both halves are the fp32 master weight, bit for bit, in 4 bytes; a master weight and
its bf16 copy take 6. Gradients are bf16. Weights, gradients and states take 14 bytes per parameter with fp32 moments
and 10 with bf16 moments, which are rounded stochastically. fp32 weights have no second half. Gradients are clipped
while the step reads them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from piledriver.kernels.registry import fastest_kernel
from piledriver.kernels.rounding import NOISE_STRIDE, join_fp32
from piledriver.optim.adamw import Params
from piledriver.optim.conditional_step import call_closure
from piledriver.optim.shards import first_row, like, local, local_gradient
from piledriver.optim.step_constants import StepCounter

Moments = Literal["fp32", "bf16"]


class SplitMasterAdamW(Optimizer):
    """AdamW with exact fp32 updates, where the model holds the upper half of each weight.

    >>> weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    >>> optimizer = SplitMasterAdamW([weight], lr=1e-4, weight_decay=0.0)
    >>> for _ in range(5):
    ...     weight.grad = torch.ones_like(weight)
    ...     optimizer.step()
    >>> weight[0].item(), round(optimizer.master(weight)[0].item(), 6)  # bf16 alone would never move
    (1.0, 0.9995)
    """

    rounds_bf16 = True
    clips_in_step = True
    skips_on_device = True

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
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "moments": moments,
            "seed": seed,
        }
        super().__init__(params, defaults)
        self._reset()

    def _reset(self) -> None:
        self._factors: dict[torch.device, Tensor] = {}
        self._counter = StepCounter()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()

    def clip(self, factor: Tensor) -> None:
        """Scale gradients by this factor while the next step reads them; the gradients themselves do not change."""
        self._factors = {factor.device: factor}

    def master(self, parameter: Tensor) -> Tensor:
        """Return the fp32 weight of a parameter (of its local shard)."""
        weight, state = local(parameter).detach(), self.state[parameter]
        return join_fp32(weight, local(state["low"])) if "low" in state else weight.float()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on every parameter that has a gradient."""
        loss = call_closure(closure)
        numbered = enumerate(((group, one) for group in self.param_groups for one in group["params"]), start=1)
        due = [(number, group, one) for number, (group, one) in numbered if one.grad is not None]
        for _, group, parameter in due:
            if not self.state[parameter]:
                self._begin(parameter, group["moments"])
        self._counter.begin(self, [(group, parameter) for _, group, parameter in due])
        for number, group, parameter in due:
            self._update(parameter, group, number)
        self._counter.end()
        self._factors = {}
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any], number: int) -> None:
        state, weight = self.state[parameter], local(parameter)
        if weight.numel() == 0:
            return
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
            first_row(parameter) * (weight[0].numel() if weight.dim() else 1),
            # The engine sets a number by name, so that noise does not depend on the other parameters.
            getattr(parameter, "noise_id", number * NOISE_STRIDE) & 0x7FFFFFFF,
        )
        increment_version(parameter)

    def _factor(self, device: torch.device) -> Tensor:
        if device not in self._factors:
            known = next(iter(self._factors.values()), None)
            self._factors[device] = torch.ones((), device=device) if known is None else known.to(device)
        return self._factors[device]

    def _begin(self, parameter: Tensor, moments: Moments) -> None:
        state, part = self.state[parameter], local(parameter)
        state["step"] = torch.zeros((), dtype=torch.float32)
        if part.dtype == torch.bfloat16:
            state["low"] = like(parameter, torch.zeros_like(part, dtype=torch.int16))
        # Vectors are small: they keep fp32 moments.
        kept = torch.bfloat16 if moments == "bf16" and part.dim() > 1 else torch.float32
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = like(parameter, torch.zeros_like(part, dtype=kept))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, but keep the dtypes of states: torch casts them to those of parameters."""
        super().load_state_dict(state_dict)
        ordered = [parameter for group in self.param_groups for parameter in group["params"]]
        numbers = [index for group in state_dict["param_groups"] for index in group["params"]]
        for parameter, index in zip(ordered, numbers, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                device = value.device if name == "step" else parameter.device
                self.state[parameter][name] = value.detach().clone().to(device)


adamw_split_bf16 = functools.partial(SplitMasterAdamW, moments="bf16")
