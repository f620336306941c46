"""What the engine remembers of a model that it laid out: its mesh, and who averages its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from piledriver.engine.errors import EngineError
from piledriver.engine.marks import LAID_OUT
from piledriver.engine.mesh import Mesh
from piledriver.engine.torch_private import parameter_groups


class EngineState:
    """Kept on the model; a copy of the model is in no group and has none."""

    def __init__(self, mesh: Mesh, reducer: Any, roots: list[nn.Module]) -> None:
        self.mesh = mesh
        self.roots = roots
        """The modules that run: the model itself, or its stages on this rank."""
        self.reducer = reducer
        self.pipeline: Any = None
        """Runs whole batches, where the model was cut into stages."""

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def attach_state(model: nn.Module, state: EngineState) -> None:
    """Keep it with the model."""
    model.__dict__[LAID_OUT] = state


def state_of(model: nn.Module) -> EngineState | None:
    """What was done to a model, if anything."""
    found: EngineState | None = model.__dict__.get(LAID_OUT)
    return found


def pipelined(model: nn.Module) -> Any:
    """The call of a model that is a pipeline, with `factor` and `syncs`; None of others."""
    known = state_of(model)
    return model.forward if known is not None and known.pipeline is not None else None


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keep gradients local within the block."""
    known = state_of(model)
    if known is not None and known.pipeline is not None:
        with _set(model.forward, syncs=False):
            yield
        return
    if known is not None and known.reducer is not None:
        with known.reducer.off():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
        return
    yield


@contextmanager
def sync_in_backward(model: nn.Module) -> Iterator[None]:
    """Average in this backward, whatever was said around it."""
    known = state_of(model)
    if known is not None and known.pipeline is not None:
        raise EngineError(
            "a pipeline averages in the call of the model, before backward",
            fix="call the model outside no_sync where gradients shall be averaged",
        )
    if known is not None and known.reducer is not None:
        with known.reducer.on():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(True)
    yield


@contextmanager
def _set(thing: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(thing, name) for name in values}
    thing.__dict__.update(values)
    try:
        yield
    finally:
        thing.__dict__.update(before)


def gradients_so_far(model: nn.Module) -> Iterator[Tensor]:
    """Every gradient that has gathered on this process, averaged or not: what a window's weights are applied to."""
    # Once each: where a forward broke off, a parameter that is still whole is the model's and the sharded module's.
    yield from {id(gradient): gradient for gradient in _gathered(model)}.values()


def _gathered(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        part = getattr(parameter, "optimizer_shard", None)
        if parameter.grad is not None:
            yield parameter.grad
        elif part is not None and part.grad is not None:
            yield part.grad
    known = state_of(model)
    for root in [model] if known is None else known.roots:
        for module in root.modules():
            if isinstance(module, FSDPModule):
                yield from _kept_whole(module)


def _kept_whole(module: FSDPModule) -> Iterator[Tensor]:
    """Gradients that `fully_shard` holds unsharded between backwards that do not communicate."""
    for group in parameter_groups(module._get_fsdp_state()):
        for one in group.fsdp_params:
            whole = getattr(one, "_unsharded_param", None)
            for gradient in (one.unsharded_accumulated_grad, None if whole is None else whole.grad):
                if gradient is not None:
                    yield gradient
