"""Gated MLPs of any class, recognised by what they compute: down(activation(gate(x)) * up(x)).

Gate and up are one product, and the backward pass keeps only its result (`kernels.gated_mlp`). Layers may be separate
(gate, up, down) or joined (gate_up, down), with or without biases.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from piledriver.engine.fused.plain import (
    has_dropout,
    in_autocast,
    is_plain_linear,
    takes_one_tensor,
    why_more_arguments,
    why_special,
    why_special_linear,
)
from piledriver.engine.fused.verify import TOLERANCE, Forward, largest_difference, trial_copy
from piledriver.kernels.gated_mlp import ACTIVATIONS, gated_linear

OPERATION = "gated MLP"
_NAMES = {"silu": "SwiGLU", "gelu_tanh": "GeGLU (tanh)", "gelu": "GeGLU"}


class Parts(NamedTuple):
    """The names of a gated MLP's layers and its activation; `up` is empty where one layer holds gate and up."""

    gate: str
    up: str
    down: str
    activation: str


def linear_shapes(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return (out, in) of the children that hold a matrix as linear layers do, by name."""
    found = {}
    for name, child in module.named_children():
        layer = getattr(child, "base_layer", child)
        if isinstance(layer, nn.Linear):
            found[name] = (layer.out_features, layer.in_features)
    return found


def is_gated_mlp(module: nn.Module) -> bool:
    """Return whether a module's linear layers have the shapes of a gated MLP, and it has no other parameters."""
    return bool(_assignments(module)) and takes_one_tensor(module)


def match_mlp(module: nn.Module, device: torch.device) -> tuple[Any, str]:
    """Return the replacement of a gated MLP's forward and its name; (None, why) if nothing agrees."""
    special = why_special(module) or why_more_arguments(module)
    special = special or ("it drops activations" if has_dropout(module) else None)
    for name in linear_shapes(module):
        why = why_special_linear(getattr(module, name))
        special = special or (None if why is None else f"{name}: {why}")
    if special is not None:
        return None, special
    twin = trial_copy(module, device)
    closest = ("", float("inf"))
    for gate, up, down in _assignments(module):
        for activation in ACTIVATIONS:
            forward = mlp_forward(Parts(gate, up, down, activation))
            width = linear_shapes(module)[gate][1]
            try:
                where, apart = largest_difference(twin, forward, width, device)
            except Exception as error:
                return None, f"its trial failed: {type(error).__name__}: {error}"
            if apart <= TOLERANCE:
                return forward, _NAMES[activation]
            closest = min(
                closest, (f"{_NAMES[activation]} differs by {apart:.1e} in {where}", apart), key=lambda c: c[1]
            )
    return None, closest[0]


@functools.cache
def mlp_forward(parts: Parts) -> Forward:
    """Return the forward of a gated MLP: one function for all alike, so that compiled blocks share a graph."""
    names = [name for name in (parts.gate, parts.up, parts.down) if name]

    def forward(module: Any, x: Tensor) -> Tensor:
        layers = [getattr(module, name) for name in names]
        if not all(is_plain_linear(layer) for layer in layers):
            # Hooked, replaced or computing in fp8 since.
            return type(module).forward(module, x)  # type: ignore[no-any-return]
        x = in_autocast(x)
        weight, bias = joined_gate_up(module, parts, x.dtype)
        down = layers[-1]
        out = gated_linear(F.linear(x, weight, bias), down.weight.to(x.dtype), weight.shape[0] // 2, parts.activation)
        return out if down.bias is None else out + down.bias.to(out.dtype)

    forward.parts = parts  # type: ignore[attr-defined]
    return forward


def joined_gate_up(module: Any, parts: Parts, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Return the weight and bias of gate and up as one layer: all rows of the gate, then all of up."""
    gate = getattr(module, parts.gate)
    if not parts.up:
        return gate.weight.to(dtype), None if gate.bias is None else gate.bias.to(dtype)
    up = getattr(module, parts.up)
    weight = torch.cat((gate.weight.to(dtype), up.weight.to(dtype)))
    return weight, None if gate.bias is None else torch.cat((gate.bias.to(dtype), up.bias.to(dtype)))


def mlp_parts(module: nn.Module) -> Parts | None:
    """Return the parts of a gated MLP that was replaced; None for other modules."""
    return getattr(getattr(vars(module).get("forward"), "__func__", None), "parts", None)


def _assignments(module: nn.Module) -> list[tuple[str, str, str]]:
    """Return which layers may be gate, up and down, by their shapes; gate before up in the order of definition."""
    shapes = linear_shapes(module)
    own = sum(1 for _ in module.parameters(recurse=False))
    inside = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    if own or inside != set(shapes):
        return []
    if len(shapes) == 2:
        (first, a), (second, b) = shapes.items()
        pairs = [(first, a, second, b), (second, b, first, a)]
        return [(one, "", other) for one, (out, dim), other, back in pairs if back == (dim, out // 2) and out % 2 == 0]
    if len(shapes) != 3:
        return []
    return [
        (gate, up, down)
        for gate, up, down in itertools.permutations(shapes, 3)
        # Three square layers are queries, keys and values.
        if shapes[gate] == shapes[up] == shapes[down][::-1] != shapes[down] and _same_bias(module, gate, up)
    ]


def _same_bias(module: nn.Module, gate: str, up: str) -> bool:
    biases = [getattr(getattr(module, name), "bias", None) is None for name in (gate, up)]
    return biases[0] == biases[1]
