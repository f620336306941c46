"""torch DDP's gradient reducer, without its wrapper module.

`DistributedDataParallel` calls its reducer around the forward pass, and wraps the model. Two hooks on the user's model
replace the first; the object, its type and its state dict keys stay what the user wrote.
Communication hooks, unused parameters and uneven inputs (`Join`) work as in torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from piledriver.engine.errors import EngineError
from piledriver.engine.options import DDPOptions
from piledriver.engine.state import state_of


class DDPReducer:
    """Broadcasts the weights of rank 0, then averages gradients in every backward."""

    def __init__(self, model: nn.Module, options: DDPOptions) -> None:
        if any(isinstance(hook, _BeforeForward) for hook in model._forward_pre_hooks.values()):
            raise EngineError(f"gradients of {type(model).__name__} are averaged already", fix="prepare the model once")
        self.model, self.options = model, options
        self.ddp = DistributedDataParallel(model, **options.arguments)
        self._settle_buckets()
        _register_hook(self.ddp, options)
        model.register_forward_pre_hook(_BeforeForward(self.ddp), prepend=True, with_kwargs=True)
        model.register_forward_hook(_AfterForward(self.ddp))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Keep gradients local within the block."""
        with self.ddp.no_sync():
            yield

    @contextmanager
    def on(self) -> Iterator[None]:
        """Average in this backward, although the forward pass ran inside `off`."""
        ddp = self.ddp
        before = ddp.require_backward_grad_sync, ddp.require_forward_param_sync
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True
        # The reducer must expect gradients that it was not told of in the forward pass.
        ddp.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = before

    def drop(self) -> None:
        """Reset after a failed backward: the reducer waits for gradients that never come.

        Buckets are rebuilt before the next forward, because that takes all ranks.
        """
        if not any(isinstance(hook, _RebuildBuckets) for hook in self.model._forward_pre_hooks.values()):
            self.ddp.reducer._reset_state()
            self.model.register_forward_pre_hook(_RebuildBuckets(), prepend=True)

    def release(self) -> None:
        """Remove the hooks."""
        _remove_rebuilds(self.model)
        for table in (self.model._forward_pre_hooks, self.model._forward_hooks):
            for key, hook in list(table.items()):
                if isinstance(hook, _BeforeForward):
                    hook.ddp = None
                    del table[key]
                    self.model._forward_pre_hooks_with_kwargs.pop(key, None)

    def _settle_buckets(self) -> None:
        """Arrange the buckets now, by the order of parameters, and not by the first real backward.

        DDP rearranges them once, and the place of a gradient in a bucket decides the order of summation. A resumed run
        would otherwise sum its first step differently from the run that never stopped.
        """
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        watched = any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters)
        if watched or not self.options.rebuilds_buckets:
            # Hooks act on gradients as they arrive, or DDP keeps its first arrangement anyway.
            return
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        with torch.enable_grad():
            self.ddp._pre_forward()  # type: ignore[no-untyped-call]
            nothing = torch.stack([parameter.sum().float() * 0 for parameter in parameters]).sum()
            self.ddp._post_forward(nothing).backward()  # type: ignore[no-untyped-call]
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad


class _BeforeForward:
    """Tells DDP that a forward pass begins. A copy of the model is in no process group: its hook does nothing."""

    def __init__(self, ddp: DistributedDataParallel | None) -> None:
        self.ddp = ddp
        # DDP's bookkeeping, which a compiler must not trace. Not a decorator: that would import the compiler.
        self.tell = None if ddp is None else torch.compiler.disable(self.bookkeeping(ddp))  # type: ignore[no-untyped-call]

    @staticmethod
    def bookkeeping(ddp: DistributedDataParallel) -> Any:
        """Return the function to call before the forward."""
        return ddp._pre_forward

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self.ddp is None or self.tell is None else self.tell(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> _BeforeForward:
        return type(self)(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None,)


class _AfterForward(_BeforeForward):
    """Tells DDP what the forward pass returned, so that it can expect its gradients."""

    @staticmethod
    def bookkeeping(ddp: DistributedDataParallel) -> Any:
        """Return the function to call after the forward."""
        return ddp._post_forward

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output if self.ddp is None or self.tell is None else self.tell(output)


class _RebuildBuckets:
    """Arranges the buckets again before the next training forward. A copy of the model has no reducer."""

    def __call__(self, model: nn.Module, _args: Any) -> None:
        if not torch.is_grad_enabled():
            return
        _remove_rebuilds(model)
        known = state_of(model)
        if known is not None and isinstance(known.reducer, DDPReducer):
            known.reducer._settle_buckets()


def _remove_rebuilds(model: nn.Module) -> None:
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, _RebuildBuckets):
            del model._forward_pre_hooks[key]


def _register_hook(ddp: DistributedDataParallel, options: DDPOptions) -> None:
    if options.hook == "no":
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    hooks: dict[str, Any] = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "power_sgd": powerSGD_hook.powerSGD_hook,
        "batched_power_sgd": powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers: dict[str, Any] = {
        "fp16": default_hooks.fp16_compress_wrapper,
        "bf16": default_hooks.bf16_compress_wrapper,
    }
    hook = hooks[options.hook]
    if options.wrapper != "no":
        hook = wrappers[options.wrapper](hook)
    state = powerSGD_hook.PowerSGDState(None, **options.hook_state) if options.hook.endswith("power_sgd") else None
    ddp.register_comm_hook(state=state, hook=hook)
