"""What a checkpoint holds, and how it is taken apart into JSON and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from piledriver.checkpoint import names, tree
from piledriver.runtime.seeds import capture_rng


@runtime_checkable
class Stateful(Protocol):
    """Anything that can be saved and restored."""

    def state_dict(self) -> dict[str, Any]:
        """The state as tensors, numbers, text and containers of these."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Become that state again."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Everything that a run saves. The same value serves `save` and `load`.

    Models, optimizers, schedulers, the scaler and custom objects are the same on every rank, or sharded as DTensors.
    Loaders, random generators and `per_rank` are each rank's own; where all ranks agree they are written once.
    """

    models: Sequence[nn.Module] = ()
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    loaders: Sequence[Any] = ()
    """Data loaders; one without `state_dict` has nothing to save and is skipped."""
    custom: Sequence[Any] = ()
    scaler: Any = None
    rng: bool = True
    """The generators of torch, its devices, NumPy and Python."""
    per_rank: Mapping[str, Any] = field(default_factory=dict)


def is_torch_optimizer(optimizer: Any) -> bool:
    """Whether an optimizer has torch's groups and states, so that its state can be named by parameter."""
    return hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")


def shared_state(contents: Contents) -> tuple[dict[str, list[tree.Json]], dict[str, torch.Tensor]]:
    """The trees and tensors of what all ranks own together."""
    parameter_names = names.parameter_names(contents.models)
    states: dict[str, list[Any]] = {
        "models": [names.model_state(model) for model in contents.models],
        "optimizers": [_optimizer_state(optimizer, parameter_names) for optimizer in contents.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in contents.schedulers],
        "custom": [thing.state_dict() for thing in contents.custom],
        "scaler": [] if contents.scaler is None else [contents.scaler.state_dict()],
    }
    trees: dict[str, list[tree.Json]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for kind, list_of_states in states.items():
        trees[kind] = []
        for index, state in enumerate(list_of_states):
            structure, found = tree.split(state, f"{kind}/{index}")
            trees[kind].append(structure)
            tensors |= {key: tensor.detach() for key, tensor in found.items()}
    return trees, tensors


def own_state(contents: Contents) -> dict[str, tree.Json]:
    """The trees of what belongs to this rank, tensors inside."""
    own: dict[str, Any] = {
        f"loaders/{index}": loader.state_dict()
        for index, loader in enumerate(contents.loaders)
        if hasattr(loader, "state_dict")
    }
    own |= {f"per_rank/{name}": thing.state_dict() for name, thing in contents.per_rank.items()}
    if contents.rng:
        own["rng"] = capture_rng()
    return {name: tree.encode(state, name, lambda _, tensor: tree.inline(tensor)) for name, state in own.items()}


def _optimizer_state(optimizer: Any, parameter_names: Mapping[int, str]) -> Any:
    inner = names.inner_optimizer(optimizer)
    return names.optimizer_state(inner, parameter_names) if is_torch_optimizer(inner) else optimizer.state_dict()
