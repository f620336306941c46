"""Materialise a model built on the meta device: allocate this rank's shards, then initialise or load them.

Our own models draw each parameter from (seed, name), so they start the same on any world size. Other models are
initialised module by module by their own `reset_parameters`, also seeded by (seed, name).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from piledriver.core.random import Stream
from piledriver.engine.errors import LayoutError
from piledriver.models import Transformer, initialise


@dataclass(frozen=True)
class InitPlan:
    """The modules of a model before its layout was applied, on the meta device."""

    modules: dict[str, nn.Module]


def init_plan(model: nn.Module) -> InitPlan:
    """Return copies of the modules that hold parameters or buffers; on the meta device they take no memory."""
    held = {
        name: copy.deepcopy(_alone(module))
        for name, module in model.named_modules()
        if not isinstance(model, Transformer) and (module._parameters or module._buffers)
    }
    return InitPlan(held)


def materialise_shards(
    model: nn.Module,
    recipe: InitPlan,
    device: torch.device,
    weights: int | Callable[[nn.Module], None],
    *,
    home: torch.device | None = None,
    allocate: Callable[[Tensor], Tensor | None] | None = None,
) -> None:
    """Allocate a model's local shards and fill them: by seed, or by the function `weights`.

    `home` is where they are allocated, by default on `device`, whose generator draws: a model starts with the same
    weights wherever they wait. `allocate` may return memory for a tensor, where its tier is neither.
    """
    home = device if home is None else home
    if allocate is not None:
        tied: dict[int, Tensor] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in tied and (made := allocate(parameter)) is not None:
                    tied[id(parameter)] = nn.Parameter(made, requires_grad=parameter.requires_grad)
                if parameter is not None and id(parameter) in tied:
                    module._parameters[name] = tied[id(parameter)]  # type: ignore[assignment]
        model._apply(lambda one: torch.empty_like(one, device=home) if one.is_meta else one)  # type: ignore[no-untyped-call]
    else:
        model.to_empty(device=home)
    if not isinstance(weights, int):
        weights(model)
    elif isinstance(model, Transformer):
        initialise(model, weights, draw_on=device)
    else:
        for name, module in recipe.modules.items():
            _reset(model.get_submodule(name), module, name, device, weights)


def _alone(module: nn.Module) -> nn.Module:
    """Return the module without its children, sharing its parameters."""
    alone = copy.copy(module)
    alone._modules = {}
    return alone


@torch.no_grad()
def _reset(target: nn.Module, recipe: nn.Module, name: str, device: torch.device, seed: int) -> None:
    reset = getattr(recipe, "reset_parameters", None) or getattr(recipe, "_reset_parameters", None)
    if reset is None:
        raise LayoutError(
            f"{name or 'the model'} ({type(recipe).__name__}) on the meta device has no reset_parameters",
            fix="give it one, load a checkpoint, or make the model with its weights",
        )
    recipe.to_empty(device=device)
    generators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=generators):
        torch.manual_seed(Stream(seed, "initialise", name).below(2**63, 0))
        reset()
    for held, wanted in ((recipe._parameters, target._parameters), (recipe._buffers, target._buffers)):
        for key, value in held.items():
            into = wanted.get(key)
            if value is not None and into is not None:
                put(into, value)
    recipe.to("meta")  # whole modules do not pile up


@torch.no_grad()
def put(target: Tensor, whole: Tensor) -> None:
    """Copy this rank's shard of a full tensor into `target`, without communication."""
    if not isinstance(target, DTensor):
        target.copy_(whole)
        return
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    part = whole[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))]
    target.to_local().copy_(part)
