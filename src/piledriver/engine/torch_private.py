"""Every use of torch's private API in the engine, so that a torch upgrade is one file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def current_backward() -> int:
    """Return the id of the backward pass that is running in this thread, -1 outside of one."""
    return torch._C._current_graph_task_id()


def call_after_backward(callback: Any) -> None:
    """Call a function when the running backward pass has finished."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def unscale_and_check(gradients: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """Multiply gradients by `inverse_scale` in place and set `found_inf` to 1 where any is not finite."""
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inverse_scale)


def process_groups() -> list[Any]:
    """Return every process group of this process."""
    return list(dist.distributed_c10d._world.pg_map)


def fsdp_shared_state(module: Any) -> Any:
    """Return what all modules that `fully_shard` sharded under one root share."""
    return module._get_fsdp_state()._state_ctx


def fsdp_param_groups(state: Any) -> list[Any]:
    """Return the groups of parameters that are gathered together: one per module before torch 2.13."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups else [group for group in [state._fsdp_param_group] if group is not None]


def unsharded_gradients(root: nn.Module) -> Iterator[Tensor]:
    """Yield the gradients that `fully_shard` holds unsharded between backwards that do not communicate."""
    for module in root.modules():
        if not hasattr(module, "_get_fsdp_state"):
            continue
        sharded: Any = module
        for group in fsdp_param_groups(sharded._get_fsdp_state()):
            for one in group.fsdp_params:
                whole = getattr(one, "_unsharded_param", None)
                for gradient in (one.unsharded_accumulated_grad, None if whole is None else whole.grad):
                    if gradient is not None:
                        yield gradient
