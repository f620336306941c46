"""AdamW with small states: 8-bit or bf16 moments, and bf16 weights that are rounded stochastically.

The arithmetic is fp32. On a GPU the update compiles to one kernel per parameter. Noise depends on (seed, step,
parameter, element) only, so that a resumed or resharded run rounds the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor

from piledriver.kernels.masked_copy import masked_copy_
from piledriver.kernels.rounding import noise_bits, round_to_bf16
from piledriver.optim.adamw.numbered import Due, NumberedAdamW, first_index
from piledriver.optim.adamw.quantise import (
    block_size,
    dequantise_signed,
    dequantise_unsigned,
    quantise_signed,
    quantise_unsigned,
)
from piledriver.optim.groups import Params
from piledriver.optim.shards import like, local, local_gradient

States = Literal["int8", "bf16", "fp32"]


class CompactAdamW(NumberedAdamW):
    """AdamW whose moments are stored as `states`. Weights may be fp32 or bf16.

    Vectors, and matrices whose last dimension is not a multiple of 64, keep fp32 moments.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        states: States = "int8",
        seed: int = 0,
        compile: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "states": states, "seed": seed}
        super().__init__(params, defaults)
        self._compile = compile

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_compile", None)

    def _update_all(self, due: Due) -> None:
        self._rates = _Rates()
        with _room_for_graphs() if any(self._use_compiler(one.device) for _, _, one in due) else nullcontext():
            super()._update_all(due)

    def _update(self, parameter: Tensor, group: dict[str, Any], noise_offset: int) -> None:
        state = self.state[parameter]
        weight, gradient = local(parameter), local_gradient(parameter)
        names = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
        moments = {name: local(state[name]) for name in names if name in state}
        width = weight.shape[-1] if weight.dim() else 1
        block = weight.numel() // moments["exp_avg_scale"].numel() if "exp_avg_scale" in moments else width
        constants = self._counter.constants(parameter)
        update = _compiled_update() if self._use_compiler(weight.device) else adam_step
        update(
            weight.view(-1, block),
            gradient.reshape(-1, block),
            {name: moment.view(-1, 1 if name.endswith("scale") else block) for name, moment in moments.items()},
            (*self._rates.of(group, weight.device), *constants.bias_corrections),
            (*group["betas"], group["eps"]),
            constants.salt + noise_offset,
            first_index(parameter),
            constants.skip,
        )

    def _begin(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, part, states = self.state[parameter], local(parameter), group["states"]
        block = block_size(part.shape[-1]) if part.dim() > 1 and states == "int8" else None
        dtype = torch.bfloat16 if states == "bf16" and part.dim() > 1 else torch.float32
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = like(parameter, torch.zeros_like(part, dtype=dtype if block is None else torch.uint8))
            if block is not None:
                scales = torch.zeros(*part.shape[:-1], part.shape[-1] // block, device=part.device)
                state[f"{name}_scale"] = like(parameter, scales, last_dim=parameter.shape[-1] // block)

    def _use_compiler(self, device: torch.device) -> bool:
        return device.type == "cuda" if self._compile is None else self._compile


adamw8bit = functools.partial(CompactAdamW, states="int8")
adamw_bf16 = functools.partial(CompactAdamW, states="bf16")


class _Rates:
    """Learning rate and decay factor of a group in one step, as tensors, once per device.

    Tensors, so that a changing learning rate neither synchronises nor recompiles.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def of(self, group: dict[str, Any], device: torch.device) -> tuple[Tensor, Tensor]:
        key = (id(group), device)
        if key not in self._made:
            lr = group["lr"]
            kept = 1.0 - lr * group["weight_decay"]
            self._made[key] = torch.full((), lr, device=device), torch.full((), kept, device=device)
        return self._made[key]


def adam_step(
    weight: Tensor,
    gradient: Tensor,
    moments: dict[str, Tensor],
    rates: tuple[Tensor, ...],
    constants: tuple[float, float, float],
    salt: Tensor,
    first_index: int,
    skip: Tensor | None = None,
) -> None:
    """Update a weight of [rows, columns] in place; the dtypes of `moments` say how states are stored."""
    lr, shrink, correction1, correction2 = rates
    beta1, beta2, eps = constants
    rounded = weight.dtype == torch.bfloat16
    first, second = _read_moments(moments)
    wide = gradient.float()
    first = beta1 * first + (1.0 - beta1) * wide
    second = beta2 * second + (1.0 - beta2) * wide * wide
    change = (first / correction1) / ((second / correction2).sqrt() + eps)
    new = weight.float() * shrink - lr * change
    if not rounded and moments["exp_avg"].dtype == torch.float32:
        for old, exact in ((weight, new), (moments["exp_avg"], first), (moments["exp_avg_sq"], second)):
            masked_copy_(old, exact, skip)
        return
    bits = noise_bits(weight.shape[0], weight.shape[1], first_index, salt, weight.device)
    # Three roundings from one hash: its low half for the weight, its high half for the moments.
    masked_copy_(weight, round_to_bf16(new, bits) if rounded else new, skip)
    _write_moments(moments, first, second, bits, skip)


def _read_moments(moments: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    if "exp_avg_scale" not in moments:
        return moments["exp_avg"].float(), moments["exp_avg_sq"].float()
    first = dequantise_signed(moments["exp_avg"], moments["exp_avg_scale"])
    return first, dequantise_unsigned(moments["exp_avg_sq"], moments["exp_avg_sq_scale"])


def _write_moments(
    moments: dict[str, Tensor], first: Tensor, second: Tensor, bits: Tensor, skip: Tensor | None
) -> None:
    # The second moment uses the same bits with halves swapped.
    other = ((bits >> 16) | (bits << 16)) & 0xFFFFFFFF
    if "exp_avg_scale" not in moments:
        small = moments["exp_avg"].dtype == torch.bfloat16
        masked_copy_(moments["exp_avg"], round_to_bf16(first, bits) if small else first, skip)
        masked_copy_(moments["exp_avg_sq"], round_to_bf16(second, other) if small else second, skip)
        return
    codes, scale = quantise_signed(first, bits.float() * 2.0**-32)
    masked_copy_(moments["exp_avg"], codes, skip)
    masked_copy_(moments["exp_avg_scale"], scale, skip)
    codes, scale = quantise_unsigned(second, other.float() * 2.0**-32)
    masked_copy_(moments["exp_avg_sq"], codes, skip)
    masked_copy_(moments["exp_avg_sq_scale"], scale, skip)


def _room_for_graphs() -> AbstractContextManager[None]:
    """Raise dynamo's recompile limit: there is a graph per kind of states, weights and step."""
    import torch._dynamo

    return cast(AbstractContextManager[None], torch._dynamo.config.patch(recompile_limit=64))


@functools.cache
def _compiled_update() -> Callable[..., None]:
    # One graph for parameters with any number of rows.
    return torch.compile(adam_step, dynamic=True, fullgraph=True)
