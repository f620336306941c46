"""torch's AdamW with the fastest implementation for the device, and its update as a function."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw

from piledriver.optim.groups import Params
from piledriver.optim.shards import local, local_gradient

# A parameter on the meta device gets its memory on one of the others.
_FUSED_DEVICES = {"cuda", "cpu", "mps", "xpu", "meta"}


def has_fused_kernel(parameters: Iterable[Tensor]) -> bool:
    """Return whether torch has a fused AdamW kernel for all of these parameters."""
    return all(p.device.type in _FUSED_DEVICES and p.is_floating_point() for p in parameters)


def make_adamw(
    params: Params,
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    capturable: bool = False,
) -> torch.optim.AdamW:
    """Return `torch.optim.AdamW`, fused if the device supports it, else foreach. `capturable` is for CUDA graphs."""
    groups = [dict(entry) if isinstance(entry, dict) else {"params": [entry]} for entry in params]
    fused = has_fused_kernel(parameter for group in groups for parameter in group["params"])
    return torch.optim.AdamW(
        groups,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        fused=fused,
        foreach=None if fused else True,
        capturable=capturable,
    )


def adamw_update(
    parameters: list[Tensor], state: dict[Tensor, Any], group: dict[str, Any], skip: Tensor | None = None
) -> None:
    """Take one AdamW step on the local shards of parameters, with torch's function."""
    for parameter in parameters:
        if not state[parameter]:
            state[parameter]["step"] = torch.zeros((), dtype=torch.float32)
            state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
    if not parameters:
        return
    parts = [local(parameter) for parameter in parameters]
    fused = has_fused_kernel(parts)
    steps = [state[parameter]["step"] for parameter in parameters]
    # The fused kernel needs the counter on the parameter's device.
    moved = [step.to(part.device) for step, part in zip(steps, parts, strict=True)] if fused else steps
    torch_adamw(
        parts,
        [local_gradient(parameter) for parameter in parameters],
        [local(state[parameter]["exp_avg"]) for parameter in parameters],
        [local(state[parameter]["exp_avg_sq"]) for parameter in parameters],
        [],
        moved,
        foreach=not fused,
        fused=fused,
        found_inf=None if skip is None else skip.float(),
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
    for parameter, step in zip(parameters, moved, strict=True):
        state[parameter]["step"] = step
