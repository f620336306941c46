"""Recover from a failed step (for example an OOM that the loop caught) so that the next one starts clean.

Autograd reports no failed backward: reducers keep waiting for it, and sharded modules keep the gradients of the part
that ran, which the next backward would add to its own.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import nn

from piledriver.engine.offload import offloaded
from piledriver.engine.state import state_of
from piledriver.engine.torch_private import current_backward, fsdp_param_groups, fsdp_shared_state


def reset_after_failure(model: nn.Module) -> None:
    """Discard what a failed backward left in flight. Gradients already accumulated stay until `zero_grad`."""
    known = state_of(model)
    if known is None:
        return
    # The user must see the error of the step, not one of the cleanup.
    with suppress(RuntimeError):
        if known.reducer is not None:
            known.reducer.drop()
        for root in known.roots:
            if hasattr(root, "_get_fsdp_state"):
                discard_step(root)
        if (on_host := offloaded(model)) is not None:
            on_host.drop()


def reset_failed_steps(root: nn.Module) -> None:
    """Make a sharded module check, before each forward, whether the previous step failed."""
    if hasattr(root, "_get_fsdp_state"):
        root.register_forward_pre_hook(_reset_if_broken, prepend=True)


def _reset_if_broken(root: Any, _args: Any) -> None:
    if current_backward() != -1:
        # A forward inside a running backward (recomputation).
        return
    state = fsdp_shared_state(root)
    if state.iter_forward_root is not None or state.post_backward_final_callback_queued:
        # A failed forward leaves the gradients of earlier micro-batches intact.
        discard_step(root, gradients=state.post_backward_final_callback_queued)


def discard_step(root: Any, *, gradients: bool = True) -> None:
    """Reset a sharded module to before its step; `gradients` also drops those not yet reduced."""
    state = root._get_fsdp_state()
    if state._is_root is None:
        return  # It never ran.
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_iter_state(state)
    for one in fsdp_shared_state(root).all_states if gradients else ():
        for group in fsdp_param_groups(one):
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if getattr(parameter, "_unsharded_param", None) is not None:
                    parameter._unsharded_param.grad = None


def _reset_iter_state(state: Any) -> None:
    """Do what `FSDPModule.reset_iter_state` of torch 2.13 does."""
    context, shared = state._comm_ctx, state._state_ctx
    for waiting in (context.all_gather_state, context.reduce_scatter_state):
        if waiting is not None and waiting.event is not None:
            state._device_handle.current_stream().wait_event(waiting.event)
    context.all_gather_state = context.reduce_scatter_state = None
    context.post_forward_order.clear()
    idle = type(state._training_state).IDLE
    for one in shared.all_states:
        one._modules_to_run_forward.clear()
        one._training_state = idle
        for group in fsdp_param_groups(one):
            if group._all_gather_result is not None:
                group.wait_for_unshard()
            if group._post_reduce_event is not None:
                state._device_handle.current_stream().wait_event(group._post_reduce_event)
            group._post_reduce_event = group._all_reduce_state = group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = idle
            group._to_sharded()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False
