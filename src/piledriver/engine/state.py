"""What the engine keeps with a prepared model: its mesh, its gradient reducer, the modules that run, the pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from piledriver.engine.errors import EngineError
from piledriver.engine.mesh import Mesh

_NAME = "_engine_state"


class Reducer(Protocol):
    """Averages the gradients of replicas in the backward pass."""

    def off(self) -> AbstractContextManager[None]:
        """Keep gradients local within the block."""

    def on(self) -> AbstractContextManager[None]:
        """Average within the block, even inside `off`."""

    def drop(self) -> None:
        """Discard what a failed backward left in flight."""

    def release(self) -> None:
        """Remove the hooks."""


class EngineState:
    """The engine's record of one prepared model. A copy of the model is in no process group and has none."""

    def __init__(self, mesh: Mesh, reducer: Reducer | None, roots: list[nn.Module]) -> None:
        self.mesh = mesh
        self.roots = roots
        """The modules that run: the model itself, or its pipeline stages on this rank."""
        self.reducer = reducer
        self.pipeline: Any = None
        """Runs whole batches, where the model is split into stages."""

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def attach_state(model: nn.Module, state: EngineState) -> None:
    """Keep the state with the model."""
    model.__dict__[_NAME] = state


def state_of(model: nn.Module) -> EngineState | None:
    """Return the state of a prepared model, None for others."""
    found: EngineState | None = model.__dict__.get(_NAME)
    return found


def pop_state(model: nn.Module) -> EngineState | None:
    """Remove and return the state of a model."""
    found: EngineState | None = model.__dict__.pop(_NAME, None)
    return found


def is_prepared(model: nn.Module) -> bool:
    """Whether the engine holds on to this model: by a reducer, shards, stages or offloaded weights.

    A replica on a single process holds nothing and may be prepared again.
    """
    known = state_of(model)
    return known is not None and not (known.mesh.alone and known.mesh.layout.reducer == "ddp")


def is_on_meta(model: nn.Module) -> bool:
    """Whether a model was built on the meta device and has no memory yet."""
    return any(tensor.is_meta for tensor in model.parameters())


def pipeline_call(model: nn.Module) -> Any:
    """Return the forward of a pipelined model, with `factor` and `syncs`; None for others."""
    known = state_of(model)
    return model.forward if known is not None and known.pipeline is not None else None


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Keep gradients local within the block."""
    from piledriver.engine.offload import offloaded

    known, made = state_of(model), offloaded(model)
    if known is not None and known.pipeline is not None:
        with _set(model.forward, syncs=False):
            yield
    elif made is not None and known is not None and known.reducer is None and _sharded(model) is None:
        with _set(made.gradients, accumulates=True):
            yield
    elif known is not None and known.reducer is not None:
        with known.reducer.off():
            yield
    elif (sharded := _sharded(model)) is not None:
        sharded.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            sharded.set_requires_gradient_sync(True)
    else:
        yield


@contextmanager
def sync_in_backward(model: nn.Module) -> Iterator[None]:
    """Average gradients in this backward, even if the forward ran inside `no_sync`."""
    known = state_of(model)
    if known is not None and known.pipeline is not None:
        raise EngineError(
            "a pipeline averages gradients in the call of the model, before backward",
            fix="call the model outside no_sync where gradients shall be averaged",
        )
    if known is not None and known.reducer is not None:
        with known.reducer.on():
            yield
        return
    if (sharded := _sharded(model)) is not None:
        sharded.set_requires_gradient_sync(True)
    yield


def gradients_so_far(model: nn.Module) -> Iterator[Tensor]:
    """Yield every gradient of the model accumulated on this rank, reduced or not."""
    # Once each: after a failed forward, an unsharded parameter belongs to the model and to the sharded module.
    yield from {id(gradient): gradient for gradient in _accumulated(model)}.values()


def window_gradients(model: nn.Module) -> Iterator[Tensor]:
    """Yield what one accumulation window has gathered: the model's gradients, and those held for another stage."""
    yield from gradients_so_far(model)
    known = state_of(model)
    if known is not None and known.pipeline is not None:
        yield from known.pipeline.tied.gradients()


def _accumulated(model: nn.Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        shard = getattr(parameter, "optimizer_shard", None)
        if parameter.grad is not None:
            yield parameter.grad
        elif shard is not None and shard.grad is not None:
            yield shard.grad
    known = state_of(model)
    if known is None or known.mesh.layout.zero != 3:
        return
    from piledriver.engine.torch_private import unsharded_gradients

    for root in known.roots:
        yield from unsharded_gradients(root)


def _sharded(model: nn.Module) -> Any:
    """The model, where `fully_shard` shards it."""
    return model if hasattr(model, "set_requires_gradient_sync") else None


@contextmanager
def _set(thing: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(thing, name) for name in values}
    thing.__dict__.update(values)
    try:
        yield
    finally:
        thing.__dict__.update(before)
