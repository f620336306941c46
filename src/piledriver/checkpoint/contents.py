"""Contents of a checkpoint, and their collection as JSON and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from piledriver.checkpoint import parameter_names, state_tree
from piledriver.runtime.seeds import capture_rng


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Objects that `save` writes and `load` restores in place.

    Models, optimizers, schedulers, the scaler and custom objects are replicated on all ranks, or sharded as DTensors.
    Loaders, random generators and `per_rank` are states of each rank; one that is equal on all ranks is written once.
    """

    models: Sequence[nn.Module] = ()
    named_by: Sequence[nn.Module] = ()
    """Models whose parameters name the states of the optimizers, if not `models`: some may be saved elsewhere."""
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    loaders: Sequence[Any] = ()
    """Data loaders; one without `state_dict` is skipped."""
    custom: Sequence[Any] = ()
    """Objects with `state_dict()` and `load_state_dict(state)`."""
    scaler: Any = None
    rng: bool = True
    """Whether to include the random generators of torch, its devices, NumPy and Python."""
    per_rank: Mapping[str, Any] = field(default_factory=dict)
    """Objects whose state differs between ranks, by name."""


def is_torch_optimizer(optimizer: Any) -> bool:
    """Return whether an optimizer has torch's groups and states, so that its state can be keyed by parameter."""
    return hasattr(optimizer, "param_groups") and hasattr(optimizer, "state")


def collect_shared(contents: Contents) -> tuple[dict[str, list[state_tree.Json]], dict[str, torch.Tensor]]:
    """Return the trees and tensors of the objects that all ranks share."""
    names = parameter_names.names_by_id(contents.named_by or contents.models)
    states: dict[str, list[Any]] = {
        "models": [parameter_names.model_state(model) for model in contents.models],
        "optimizers": [_optimizer_state(optimizer, names) for optimizer in contents.optimizers],
        "schedulers": [scheduler.state_dict() for scheduler in contents.schedulers],
        "custom": [thing.state_dict() for thing in contents.custom],
        "scaler": [] if contents.scaler is None else [contents.scaler.state_dict()],
    }
    trees: dict[str, list[state_tree.Json]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for kind, list_of_states in states.items():
        trees[kind] = []
        for index, state in enumerate(list_of_states):
            structure, found = state_tree.split_state(state, f"{kind}/{index}")
            trees[kind].append(structure)
            tensors |= {key: tensor.detach() for key, tensor in found.items()}
    return trees, tensors


def collect_own(contents: Contents) -> dict[str, state_tree.Json]:
    """Return the trees of the states of this rank, with tensors inline."""
    own: dict[str, Any] = {
        f"loaders/{index}": loader.state_dict()
        for index, loader in enumerate(contents.loaders)
        if hasattr(loader, "state_dict")
    }
    own |= {f"per_rank/{name}": thing.state_dict() for name, thing in contents.per_rank.items()}
    if contents.rng:
        own["rng"] = capture_rng()
    return {name: state_tree.encode_inline(state, name) for name, state in own.items()}


def _optimizer_state(optimizer: Any, names: Mapping[int, str]) -> Any:
    inner = parameter_names.unwrap_optimizer(optimizer)
    return parameter_names.optimizer_state(inner, names) if is_torch_optimizer(inner) else optimizer.state_dict()
