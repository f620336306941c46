"""A step that broke off (out of memory, caught by the loop) leaves nothing: the next is as if it had never been tried.

Autograd tells nobody that a backward has failed: what was waiting for its end goes on waiting, and sharded modules keep
gradients of the half that ran, which the next backward would add to its own.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import nn

from piledriver.engine.offload import offloaded
from piledriver.engine.state import state_of
from piledriver.engine.torch_private import current_backward, fsdp_param_groups, fsdp_shared_state


def reset_after_failure(model: nn.Module) -> None:
    """Drop what a backward that failed left underway. Gradients that had arrived stay until they are cleared."""
    known = state_of(model)
    if known is None:
        return
    # The error that broke the step off is the one to be seen.
    with suppress(RuntimeError):
        if known.reducer is not None:
            known.reducer.drop()
        for root in known.roots:
            if hasattr(root, "_get_fsdp_state"):
                discard_step(root)
        if (on_host := offloaded(model)) is not None:
            on_host.drop()


def reset_failed_steps(root: nn.Module) -> None:
    """Let a sharded module's forward begin with a look at how the step before ended."""
    if hasattr(root, "_get_fsdp_state"):
        root.register_forward_pre_hook(_reset_if_broken, prepend=True)


def _reset_if_broken(root: Any, _args: Any) -> None:
    if current_backward() != -1:
        # A forward within a backward (recomputation): that one is still running.
        return
    state = fsdp_shared_state(root)
    if state.iter_forward_root is not None or state.post_backward_final_callback_queued:
        # A forward that failed has not touched the gradients of the batches before it.
        discard_step(root, gradients=state.post_backward_final_callback_queued)


def discard_step(root: Any, *, gradients: bool = True) -> None:
    """Put a sharded module back to where no step has begun, and drop gradients that are not shared out yet."""
    state = root._get_fsdp_state()
    if state._is_root is None:
        # Never ran.
        return
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
    """What `FSDPModule.reset_iter_state` does, before torch 2.13."""
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
