"""Which modules may be computed by other code: those that do what their class says, and nothing beside it."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from piledriver.engine.shards.local_params import reads_replicas
from piledriver.engine.torch_private import has_hooks
from piledriver.optim.shards import local

_INDICES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "training"})


def why_special(module: nn.Module, *, replicas: bool = False) -> str | None:
    """Return why a module must run its own forward; None for a plain one.

    With `replicas` a module whose forward reads full parameters that tensor parallelism replicated is plain.
    """
    if "forward" in vars(module):
        return "its forward was replaced"
    if not (replicas and reads_replicas(module)):
        sharded = [name for name, one in module.named_parameters(recurse=False) if isinstance(one, DTensor)]
        if sharded:
            return f"{sharded[0]} is sharded or replicated over ranks"
        if has_hooks(module):
            return "it has hooks"
    if parametrize.is_parametrized(module):
        return "its parameters are parametrised"
    for name, parameter in module.named_parameters(recurse=False):
        if type(local(parameter)) not in (nn.Parameter, Tensor) or not parameter.is_floating_point():
            return f"{name} is quantised ({type(parameter).__name__}, {str(parameter.dtype).removeprefix('torch.')})"
    return None


def why_special_linear(layer: Any) -> str | None:
    """Return why a layer is no plain `nn.Linear`; None if it is one."""
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        return f"it is a {type(layer).__module__.partition('.')[0]} {type(layer).__name__}"
    return why_special(layer)


def is_plain_linear(layer: Any) -> bool:
    """Return whether a layer is a plain `nn.Linear` at this moment: asked in every forward, and traced away."""
    return (
        isinstance(layer, nn.Linear)
        and type(layer).forward is nn.Linear.forward
        and "forward" not in layer.__dict__
        and not has_hooks(layer)
        and not isinstance(layer.weight, DTensor)
    )


def module_kind(module: nn.Module) -> Hashable:
    """Return a key that equal modules share: class, settings, shapes, children. Weights and layer numbers differ."""
    settings: list[tuple[str, Any]] = []
    for name, value in vars(module).items():
        if name in _INDICES or name.startswith("_") or isinstance(value, Tensor):
            continue
        settings.append((name, _key(value)))
    shapes = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in module.named_parameters(recurse=False)]
    children = [(name, module_kind(child)) for name, child in module.named_children()]
    return type(module), tuple(sorted(settings, key=str)), tuple(shapes), tuple(children)


def _key(value: Any, depth: int = 2) -> Hashable:
    """Return a key that equal settings share; objects that cannot be compared are only equal to themselves."""
    if isinstance(value, int | float | str | bool | None | torch.dtype):
        return value
    if isinstance(value, list | tuple):
        return tuple(_key(one, depth) for one in value)
    if isinstance(value, functools.partial):
        return (_key(value.func, depth), _key(value.args, depth), _key(sorted(value.keywords.items()), depth))
    if inspect.isroutine(value) or isinstance(value, type):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', id(value))}"
    if depth and callable(value) and hasattr(value, "__dict__"):
        return (type(value), tuple(sorted((name, _key(one, depth - 1)) for name, one in vars(value).items())))
    return id(value)


def takes_one_tensor(module: nn.Module) -> bool:
    """Return whether a module's forward has one required argument."""
    return sum(one.default is inspect.Parameter.empty for one in _positional(module)) == 1


def why_more_arguments(module: nn.Module) -> str | None:
    """Return why a function of one tensor cannot replace a forward: it has optional arguments (a norm's gate)."""
    names = [one.name for one in _positional(module) if one.default is not inspect.Parameter.empty]
    return f"its forward also takes {' and '.join(names)}" if names else None


def _positional(module: nn.Module) -> list[inspect.Parameter]:
    given = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return [one for one in given if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]


def has_dropout(module: nn.Module) -> bool:
    """Return whether a module drops activations in training."""
    return any(isinstance(child, nn.Dropout) and child.p > 0 for child in module.modules())


def in_autocast(x: Tensor) -> Tensor:
    """Return a tensor in the dtype of autocast, if that is enabled."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def install(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Make a module compute by a function of the module and its arguments.

    A bound method: equal blocks share a compiled graph, a deep copy computes with its own weights, and a pickled model
    comes back with its own forward.
    """
    function: Any = forward
    function.__name__, function.is_fused = "forward", True
    module.forward = types.MethodType(forward, module)
