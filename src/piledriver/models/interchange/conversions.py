"""Conversions of config values that two libraries express differently, named in the YAML files of `families/`.

A family maps a field of ours to one of their keys, or to `[conversion, their keys or constants...]`. Writing is
verified by reading (`config_json`), so a conversion need not reject what it cannot express.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from piledriver.models.config import ModelConfig

Theirs = Mapping[str, Any]


class Conversion(NamedTuple):
    """How to read one of our fields from their config, and how to write it."""

    read: Callable[..., Any]
    """(their config, arguments...) to our value."""
    write: Callable[..., dict[str, Any]]
    """(our value, our config, arguments...) to their keys and values."""


def _number(x: float) -> float | int:
    return int(x) if x == int(x) else x


def _write_inverse_sqrt(value: float | None, config: ModelConfig, key: str) -> dict[str, Any]:
    if value is None:
        return {key: config.head_dim}
    exact = round(value**-2)
    return {key: exact if exact > 0 and exact**-0.5 == value else value**-2}


def _read_sparse(theirs: Theirs, listed: str, step: str) -> list[int]:
    every, without = theirs.get(step) or 1, theirs.get(listed) or []
    layers = range(int(theirs["num_hidden_layers"]))
    return [layer for layer in layers if layer in without or (layer + 1) % every]


def _read_expert_layers(theirs: Theirs, listed: str, step: str) -> list[int]:
    every, layers = theirs.get(step) or 1, int(theirs["num_hidden_layers"])
    found = theirs.get(listed)
    found = range(every - 1, layers, every) if found is None else found
    return [layer for layer in range(layers) if layer not in found]


def _read_zero_layers(theirs: Theirs, flags: str, interval: str) -> list[int]:
    found, every = theirs.get(flags), theirs.get(interval) or 4
    if not found:
        found = [(layer + 1) % every for layer in range(int(theirs["num_hidden_layers"]))]
    return [layer for layer, rotates in enumerate(found) if not rotates]


def _heads(theirs: Theirs) -> tuple[int, int]:
    return int(theirs["n_embd"]), int(theirs["n_head"])


CONVERSIONS: dict[str, Conversion] = {
    "inverse": Conversion(
        lambda theirs, key: None if theirs.get(key) is None else 1 / theirs[key],
        lambda value, _, key: {key: _number(1 / value)},
    ),
    "inverse_sqrt": Conversion(
        lambda theirs, key: None if theirs.get(key) is None else theirs[key] ** -0.5, _write_inverse_sqrt
    ),
    # A flag that chooses between two of our values.
    "either": Conversion(
        lambda theirs, key, yes, no: yes if theirs.get(key) else no,
        lambda value, _, key, yes, no: {key: value == yes},
    ),
    "or_one": Conversion(lambda theirs, key: theirs.get(key) or 1, lambda value, _, key: {key: value}),
    # A value that counts only with a flag.
    "if_true": Conversion(
        lambda theirs, flag, key: theirs.get(key) if theirs.get(flag) else 0.0,
        lambda value, _, flag, key: {flag: value != 0} | ({key: value} if value else {}),
    ),
    "query_dim": Conversion(
        lambda theirs, plain, rope: theirs[plain] + theirs[rope],
        lambda value, config, plain, rope: {plain: value - config.rotary_dim, rope: config.rotary_dim},
    ),
    "shared_experts": Conversion(
        lambda theirs, count, width: (theirs.get(count) or 0) * theirs[width],
        lambda value, config, count, width: {count: (value or 0) // config.moe.expert_dim},
    ),
    "first_layers": Conversion(
        lambda theirs, key: list(range(min(theirs.get(key) or 0, int(theirs["num_hidden_layers"])))),
        lambda value, _, key: {key: len(value)},
    ),
    "sparse_layers": Conversion(_read_sparse, lambda value, _, listed, step: {listed: list(value), step: 1}),
    "expert_layers": Conversion(
        _read_expert_layers,
        lambda value, config, listed, step: {listed: [i for i in range(config.layers) if i not in value], step: 1},
    ),
    "zero_layers": Conversion(
        _read_zero_layers,
        lambda value, config, flags, _: {flags: [int(layer not in value) for layer in range(config.layers)]},
    ),
    "rotary_dim": Conversion(
        lambda theirs, key: theirs[key] * _heads(theirs)[1] / _heads(theirs)[0],
        lambda value, config, key: {key: config.rotary_dim},
    ),
    # Old Gemma files say gelu and mean its approximation by tanh.
    "tanh_gelu": Conversion(
        lambda theirs, key: "gelu_tanh" if theirs.get(key) in ("gelu", "gelu_pytorch_tanh", None) else theirs[key],
        lambda value, _, key: {key: "gelu_pytorch_tanh" if value == "gelu_tanh" else value},
    ),
}
