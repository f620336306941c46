"""One copy of the model per process, gradients averaged: torch's own reducer, without its wrapper.

`DistributedDataParallel` does two things: it calls its reducer around the forward pass, and it wraps the model. Here
the first is done by two hooks on the user's model, and the second not at all: the object, its type and the keys of its
state dict stay what the user wrote. Communication hooks, unused parameters and uneven inputs (`Join`) work as in torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from piledriver.accelerator.errors import PreparedTwiceError
from piledriver.accelerator.options import DDPCommunicationHookType, DistributedDataParallelKwargs


class _BeforeForward:
    """Tells the reducer that a forward pass begins. A copy of the model is not in the group: it gets no reducer."""

    def __init__(self, reducer: DistributedDataParallel | None) -> None:
        self.reducer = reducer
        # The reducer's bookkeeping, which a compiler must not trace. Not a decorator: that would import the compiler.
        self.tell = None if reducer is None else torch.compiler.disable(self.bookkeeping(reducer))  # type: ignore[no-untyped-call]

    @staticmethod
    def bookkeeping(reducer: DistributedDataParallel) -> Any:
        """What the reducer is told."""
        return reducer._pre_forward

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self.reducer is None or self.tell is None else self.tell(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> _BeforeForward:
        return type(self)(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)


class _AfterForward(_BeforeForward):
    """Tells the reducer what the forward pass gave, so that it can expect its gradients."""

    @staticmethod
    def bookkeeping(reducer: DistributedDataParallel) -> Any:
        """What the reducer is told."""
        return reducer._post_forward

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self.reducer is None or self.tell is None else self.tell(output)


def replicate(model: nn.Module, options: DistributedDataParallelKwargs | None = None) -> None:
    """Give every process the weights of rank 0, and average gradients in every backward from now on."""
    if reducer_of(model) is not None:
        raise PreparedTwiceError(
            f"the model {type(model).__name__} is averaged over processes already", fix="prepare it once"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return
    options = options or DistributedDataParallelKwargs()
    reducer = DistributedDataParallel(model, **options.to_kwargs())
    _settle_buckets(reducer, options)
    _register_communication(reducer, options)
    model.register_forward_pre_hook(_BeforeForward(reducer), prepend=True, with_kwargs=True)
    model.register_forward_hook(_AfterForward(reducer))


def renew(model: nn.Module, options: DistributedDataParallelKwargs | None = None) -> None:
    """Let a reducer begin anew whose backward failed: it waits for gradients that never come.

    Before the next forward, because arranging buckets takes all processes.
    """
    reducer = reducer_of(model)
    if reducer is not None and not any(isinstance(hook, _Renew) for hook in model._forward_pre_hooks.values()):
        reducer.reducer._reset_state()
        model.register_forward_pre_hook(_Renew(options or DistributedDataParallelKwargs()), prepend=True)


class _Renew:
    """Arranges the buckets again before the next forward that trains."""

    def __init__(self, options: DistributedDataParallelKwargs) -> None:
        self.options = options

    def __call__(self, model: nn.Module, _args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        _drop_renewals(model)
        if (reducer := reducer_of(model)) is not None:
            _settle_buckets(reducer, self.options)

    def __deepcopy__(self, memo: Any) -> _Renew:
        # A copy of the model has no reducer.
        return _Renew(self.options)


def _drop_renewals(model: nn.Module) -> None:
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, _Renew):
            del model._forward_pre_hooks[key]


def _settle_buckets(reducer: DistributedDataParallel, options: DistributedDataParallelKwargs) -> None:
    """Let the reducer arrange its buckets now, by the order of parameters, and not by its first real backward.

    It rearranges them once, and where a gradient lies in a bucket decides in which order processes are summed. A run
    that resumed would otherwise sum its first step differently from the run that never stopped.
    """
    parameters = [parameter for parameter in reducer.module.parameters() if parameter.requires_grad]
    watched = any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters)
    if watched or options.static_graph or options.find_unused_parameters:
        # Somebody acts on gradients as they come, or the reducer keeps its first arrangement anyway.
        return
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    with torch.enable_grad():
        reducer._pre_forward()  # type: ignore[no-untyped-call]
        nothing = torch.stack([parameter.sum().float() * 0 for parameter in parameters]).sum()
        reducer._post_forward(nothing).backward()  # type: ignore[no-untyped-call]
    for parameter, grad in zip(parameters, before, strict=True):
        parameter.grad = grad


def reducer_of(model: nn.Module) -> DistributedDataParallel | None:
    """The reducer that averages a model's gradients, if there is one."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, _BeforeForward):
            return hook.reducer
    return None


def forget(model: nn.Module) -> None:
    """Take the hooks off again."""
    _drop_renewals(model)
    for table in (model._forward_pre_hooks, model._forward_hooks):
        for key, hook in list(table.items()):
            if isinstance(hook, _BeforeForward):
                hook.reducer = None
                del table[key]
                model._forward_pre_hooks_with_kwargs.pop(key, None)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keep gradients local within the block."""
    reducer = reducer_of(model)
    if reducer is None:
        yield
        return
    with reducer.no_sync():
        yield


@contextmanager
def sync_in_backward(model: nn.Module) -> Iterator[None]:
    """Average in this backward, although the forward pass ran inside `no_sync`."""
    reducer = reducer_of(model)
    if reducer is None:
        yield
        return
    before = reducer.require_backward_grad_sync, reducer.require_forward_param_sync
    reducer.require_backward_grad_sync = reducer.require_forward_param_sync = True
    # The reducer must expect gradients that it was not told of in the forward pass.
    reducer.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        reducer.require_backward_grad_sync, reducer.require_forward_param_sync = before


def _register_communication(reducer: DistributedDataParallel, options: DistributedDataParallelKwargs) -> None:
    if options.comm_hook == DDPCommunicationHookType.NO:
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    hooks: dict[DDPCommunicationHookType, Any] = {
        DDPCommunicationHookType.FP16: default_hooks.fp16_compress_hook,
        DDPCommunicationHookType.BF16: default_hooks.bf16_compress_hook,
        DDPCommunicationHookType.POWER_SGD: powerSGD_hook.powerSGD_hook,
        DDPCommunicationHookType.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers: dict[DDPCommunicationHookType, Any] = {
        DDPCommunicationHookType.FP16: default_hooks.fp16_compress_wrapper,
        DDPCommunicationHookType.BF16: default_hooks.bf16_compress_wrapper,
    }
    hook = hooks[options.comm_hook]
    if options.comm_wrapper != DDPCommunicationHookType.NO:
        hook = wrappers[options.comm_wrapper](hook)
    power = (DDPCommunicationHookType.POWER_SGD, DDPCommunicationHookType.BATCHED_POWER_SGD)
    state = powerSGD_hook.PowerSGDState(None, **options.comm_state_option) if options.comm_hook in power else None
    reducer.register_comm_hook(state=state, hook=hook)
