"""Every use of torch's private API in the engine, so that a torch upgrade is one file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def make_wrapper(kind: type[Any], like: Tensor, device: torch.device) -> Any:
    """Return a tensor of a subclass without values, with the shape, strides and dtype of another."""
    return torch.Tensor._make_wrapper_subclass(
        kind, like.shape, strides=like.stride(), storage_offset=0, dtype=like.dtype, device=device
    )


def without_torch_function() -> Any:
    """Return a context in which functions of tensor subclasses are not overridden."""
    return torch._C.DisableTorchFunctionSubclass()


def attribute_access(name: str, access: str) -> Any:
    """Return what `__torch_function__` is called with when an attribute of a tensor is read (`__get__`) or set."""
    return getattr(vars(torch._C.TensorBase)[name], access)


def is_transformed() -> bool:
    """Return whether a `torch.func` transform is running, which does not see through a tensor without values."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_hooks(module: nn.Module) -> bool:
    """Return whether anything is hooked to a module's call; torch has no public way to ask."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def remove_pre_hooks(module: nn.Module, kind: type[Any]) -> None:
    """Remove the forward pre-hooks of a kind."""
    for key in [key for key, hook in module._forward_pre_hooks.items() if isinstance(hook, kind)]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def remove_hooks(module: nn.Module, kind: type[Any]) -> None:
    """Remove the forward hooks of a kind."""
    for key in [key for key, hook in module._forward_hooks.items() if isinstance(hook, kind)]:
        del module._forward_hooks[key]
        module._forward_hooks_always_called.pop(key, None)
        module._forward_hooks_with_kwargs.pop(key, None)


def raise_recompile_limit(least: int) -> None:
    """Let the compiler keep at least so many graphs of one function; beyond its limit it would run uncompiled."""
    import torch._dynamo.config as config

    config.recompile_limit = max(config.recompile_limit, least)


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


def fsdp_groups_in(module: nn.Module) -> list[Any]:
    """Return the groups that `fully_shard` made of a module and of the modules in it, the outermost first."""
    sharded: list[Any] = [one for one in module.modules() if hasattr(one, "_get_fsdp_state")]
    return [group for one in sharded for group in fsdp_param_groups(one._get_fsdp_state())]


def around_unshard(group: Any, around: Any) -> None:
    """Enter `around(async_op)` around every read of the shards of a group of `fully_shard`: its all-gathers.

    A group of one rank does not communicate: it copies its shards when it waits for the all-gather.
    """
    kind = type(group)

    def unshard(async_op: bool = False) -> None:
        if group._all_gather_result is None and not group.is_unsharded:
            with around(async_op):
                kind.unshard(group, async_op)

    def wait_for_unshard() -> None:
        if group._all_gather_result is not None:
            with around(False):
                kind.wait_for_unshard(group)

    if gathers_alone(group):
        group.wait_for_unshard = wait_for_unshard
    else:
        group.unshard = unshard
    for one in group.fsdp_params:
        # What the first forward would do; it would also take the empty parameter for the memory to gather from.
        one._init_extensions()
    group._reset_sharded_params = True


def undo_around_unshard(group: Any) -> None:
    """Undo `around_unshard`."""
    for name in ("unshard", "wait_for_unshard"):
        group.__dict__.pop(name, None)


def gathers_alone(group: Any) -> bool:
    """Return whether a group of `fully_shard` shards over one rank."""
    return not hasattr(group.mesh_info, "shard_process_group") or group._all_gather_process_group.size() == 1


def is_before_backward(group: Any) -> bool:
    """Return whether a group of `fully_shard` is gathered for a backward."""
    return bool(group._training_state == type(group._training_state).PRE_BACKWARD)


def all_gather_stream(group: Any, async_op: bool) -> Any:
    """Return the CUDA stream that reads the shards of a group of `fully_shard`."""
    if gathers_alone(group):
        return torch.cuda.current_stream(group.device)
    return group.comm_ctx.get_all_gather_streams(async_op, group._training_state)[0]


class FsdpShard:
    """One parameter of a group of `fully_shard`: what its all-gather reads, which may differ from the parameter."""

    def __init__(self, held: Any) -> None:
        self._held = held

    @classmethod
    def of_group(cls, group: Any) -> list[FsdpShard]:
        """Return the parameters of a group."""
        return [cls(one) for one in group.fsdp_params]

    @property
    def parameter(self) -> nn.Parameter:
        """The sharded parameter."""
        found: nn.Parameter = self._held.sharded_param
        return found

    def gather_from(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return new memory that all-gathers read from now on, flat, with the padding that makes shards even."""
        made = torch.empty(self._held.padded_sharded_param_size.numel(), dtype=dtype, device=device)
        self._held._sharded_param_data = made
        return made

    def reset(self) -> None:
        """Let all-gathers read the parameter itself."""
        self._held.reset_sharded_param()


def unmoved_dtensor(part: Tensor, mesh: Any, placements: Any, shape: torch.Size) -> Any:
    """Return a local tensor as a `DTensor`; unlike by `from_local` it stays on its device, whatever the mesh's is."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, part.dtype))
    return DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def replace_local(parameter: Tensor, part: Tensor) -> None:
    """Give a parameter that is a `DTensor` another local tensor, also on another device; the object stays."""
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    if parameter.device == part.device and parameter.dtype == part.dtype:
        parameter._local_tensor = part
        return
    whole = DTensor(part, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    made = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    made.__dict__.update({key: value for key, value in parameter.__dict__.items() if key not in made.__dict__})
    torch.utils.swap_tensors(parameter, made)  # type: ignore[no-untyped-call]
