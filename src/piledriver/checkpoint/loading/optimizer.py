"""Match the saved state of an optimizer by parameter name; the optimizer may hold other shards or layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import empty as empty_dtensor

from piledriver.checkpoint import state_tree
from piledriver.checkpoint.opened_checkpoint import OpenedCheckpoint
from piledriver.checkpoint.parameter_names import UNNAMED, named_parameters_of

Placed = tuple[int, int, str, torch.Tensor]
"""Group, position over all groups, name and parameter."""


@dataclass(frozen=True)
class OptimizerMatch:
    """What a load will read, and the call that passes it to the optimizer."""

    reads: list[tuple[str, torch.Tensor]]
    load: Callable[[], None]
    matched: list[str]
    missing: list[str]
    unexpected: list[str]


def match_optimizer(
    optimizer: Any,
    parameter_names: Mapping[int, str],
    saved: state_tree.Json,
    opened: OpenedCheckpoint,
    saved_shapes: Mapping[str, tuple[int, ...]],
) -> OptimizerMatch:
    """Match states by name; targets are allocated like the parameters, so that a rank reads only its shards."""
    current = list(named_parameters_of(optimizer, parameter_names))
    groups = [dict(state_tree.mapping_items(group)) for group in saved["param_groups"]]
    states = dict(state_tree.mapping_items(saved["state"]))
    if any(isinstance(name, int) or name.startswith(UNNAMED) for group in groups for name in group["params"]):
        groups, states = _by_name(groups, states, [name for _, _, name, _ in current])
    group_of = {name: number for number, group in enumerate(groups) for name in group["params"]}
    reads: list[tuple[str, torch.Tensor]] = []
    loaded: dict[int, dict[str, Any]] = {}
    matched: list[str] = []
    missing: list[str] = []
    for _, position, name, parameter in current:
        existing = optimizer.state.get(parameter, {})
        # The state of a weight with another shape is not loaded; the report of the model names the weight.
        if name not in group_of or saved_shapes.get(name, tuple(parameter.shape)) != tuple(parameter.shape):
            missing += [name] if name not in group_of else []
            loaded[position] = dict(existing)
        elif name in states:
            loaded[position] = {
                key: state_tree.rebuild_state(value, _target(key, parameter, existing, opened, reads))
                for key, value in state_tree.mapping_items(states[name])
            }
            matched.append(name)

    options = [
        _options(number, group, current, groups, group_of, opened, reads)
        for number, group in enumerate(optimizer.param_groups)
    ]
    rest = {
        key: state_tree.rebuild_state(value, _like(None, opened, reads))
        for key, value in state_tree.mapping_items(saved)
        if key not in ("state", "param_groups")
    }

    def load() -> None:
        optimizer.load_state_dict({**rest, "state": loaded, "param_groups": options})
        _keep_dtypes(optimizer, current, loaded)

    unexpected = sorted(set(group_of) - {name for _, _, name, _ in current})
    return OptimizerMatch(reads, load, matched, missing, unexpected)


def _options(
    number: int,
    group: Mapping[str, Any],
    current: list[Placed],
    groups: list[dict[str, Any]],
    group_of: Mapping[str, int],
    opened: OpenedCheckpoint,
    reads: list[tuple[str, torch.Tensor]],
) -> dict[str, Any]:
    """Return the options of a group (learning rate, betas, ...) from the saved group of its parameters."""
    members = [(position, name) for in_group, position, name, _ in current if in_group == number]
    source = next((group_of[name] for _, name in members if name in group_of), None)
    options = {key: value for key, value in group.items() if key != "params"}
    for key, value in groups[source].items() if source is not None else ():
        if key not in ("params", "param_names"):
            options[key] = state_tree.rebuild_state(value, _like(group.get(key), opened, reads))
    return {**options, "params": [position for position, _ in members]}


def _like(example: Any, opened: OpenedCheckpoint, reads: list[tuple[str, torch.Tensor]]) -> state_tree.GetTensor:
    """Return a getter for options that are tensors (a capturable learning rate), on the device of `example`."""

    def get(found: Mapping[str, Any]) -> torch.Tensor:
        entry = opened.index[found["key"]]
        device = example.device if isinstance(example, torch.Tensor) else "cpu"
        reads.append((found["key"], torch.empty(entry.shape, dtype=entry.dtype, device=device)))
        return reads[-1][1]

    return get


def _keep_dtypes(optimizer: Any, current: list[Placed], loaded: Mapping[int, Mapping[str, Any]]) -> None:
    # torch casts states to the dtype of the parameter; a float32 state of a bfloat16 weight must stay float32.
    for _, position, _, parameter in current:
        for key, value in loaded.get(position, {}).items():
            now = optimizer.state[parameter].get(key)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][key] = value.to(now.device)


def _target(
    key: str,
    parameter: torch.Tensor,
    existing: Mapping[str, Any],
    opened: OpenedCheckpoint,
    reads: list[tuple[str, torch.Tensor]],
) -> state_tree.GetTensor:
    def get(found: Mapping[str, Any]) -> torch.Tensor:
        entry = opened.index[found["key"]]
        present = existing.get(key)
        made: torch.Tensor
        if isinstance(present, torch.Tensor) and tuple(present.shape) == entry.shape and present.dtype == entry.dtype:
            made = present
        elif tuple(parameter.shape) == entry.shape and entry.shape:
            master = getattr(parameter, "master_weight", None)
            if master is not None:
                # An offloaded weight keeps its states in its own tier.
                made = master.empty_state(entry.dtype)
            else:
                made = torch.empty_like(parameter, dtype=entry.dtype, requires_grad=False)
        elif isinstance(parameter, DTensor) and entry.shape:
            # A factor of the weight (Adafactor's rows and columns) is replicated.
            mesh = parameter.device_mesh
            made = empty_dtensor(
                *entry.shape, dtype=entry.dtype, device_mesh=mesh, placements=[Replicate()] * mesh.ndim
            )
        else:
            # Step counts stay on the host; torch moves those of fused or capturable optimizers.
            made = torch.empty(entry.shape, dtype=entry.dtype, device="cpu" if key == "step" else parameter.device)
        reads.append((found["key"], made))
        return made

    return get


def _by_name(
    groups: list[dict[str, Any]], states: Mapping[Any, state_tree.Json], current: list[str]
) -> tuple[list[dict[str, Any]], dict[Any, state_tree.Json]]:
    """Return groups and states with names for torch's numbers, in the order of the current optimizer."""
    numbers = [number for group in groups for number in group["params"]]
    name_of = {number: current[i] if i < len(current) else f"parameter {number}" for i, number in enumerate(numbers)}
    named = [{**group, "params": [name_of[number] for number in group["params"]]} for group in groups]
    return named, {name_of.get(number, str(number)): state for number, state in states.items()}


def model_shapes(opened: OpenedCheckpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the saved weights by the names that optimizer states have."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index, model in enumerate(opened.shared.get("models", [])):
        for name, found in state_tree.mapping_items(model):
            for key in state_tree.tensor_keys(found):
                shapes[name if index == 0 else f"{index}:{name}"] = opened.index[key].shape
    return shapes
