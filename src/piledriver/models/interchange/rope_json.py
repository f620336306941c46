"""Rotary settings of a `config.json`: one dict since transformers 5, several keys before, some per layer type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from piledriver.models.config import ModelConfig, RopeScaling
from piledriver.models.interchange.errors import InterchangeError
from piledriver.models.interchange.families import Family

# Our field of `RopeScaling`: their key. The first two belong to every kind.
_NAMES = {
    "factor": "factor",
    "original_max_positions": "original_max_position_embeddings",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "truncate",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}
_FIELDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_positions", "low_frequency_factor", "high_frequency_factor"),
    "yarn": (
        *("factor", "original_max_positions", "beta_fast", "beta_slow", "truncate", "attention_factor"),
        *("mscale", "mscale_all_dim"),
    ),
    "longrope": ("factor", "original_max_positions", "attention_factor", "short_factors", "long_factors"),
}
_OLD_NAMES = {"su": "longrope"}


def read_rope(kind: Family, theirs: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return our rotary fields; `theirs` has the family's defaults, `given` is what the file says."""
    said = given if any(given.get(key) for key in ("rope_scaling", "rope_parameters")) else theirs
    rope = said.get("rope_parameters") or {}
    if "full_attention" in rope or "sliding_attention" in rope or kind.rope_by_type:
        return _read_by_type(kind, theirs, rope)
    return _read_one(kind, theirs, {**(said.get("rope_scaling") or {}), **rope})


def _read_by_type(kind: Family, theirs: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    full = {**(theirs.get("rope_scaling") or {}), **(rope.get("full_attention") or {})}
    sliding = dict(rope.get("sliding_attention") or {})
    if sliding.get("rope_type", "default") != "default":
        raise InterchangeError(
            f"{kind.name} with rope_parameters.sliding_attention.rope_type: {sliding['rope_type']} is not supported",
            fix="windowed blocks have unscaled rotary positions: use default",
        )
    ours = _read_one(kind, theirs, full)
    theta = sliding.get("rope_theta", theirs.get("rope_local_base_freq") or ours["rope_theta"])
    if theta != ours["rope_theta"] or "rope_scaling" in ours:
        ours["sliding_rope_theta"] = theta
    return ours


def _read_one(kind: Family, theirs: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    rope = {key: value for key, value in rope.items() if value is not None}
    old = {field: theirs[key] for field, key in kind.rope_keys.items() if theirs.get(key) is not None}
    ours: dict[str, Any] = {
        "rope_theta": rope.get("rope_theta", theirs.get("rope_theta") or old.get("rope_theta", 10000.0))
    }
    fraction = rope.get("partial_rotary_factor", old.get("rope_fraction", 1.0))
    if "rope_fraction" not in kind.config:
        ours["rope_fraction"] = fraction
    if fraction != 1.0 and not kind.partial_rotary:
        # transformers accepts the setting for these too, and then rotates whole heads.
        raise InterchangeError(
            f"{kind.name} with partial_rotary_factor {fraction:g} is not supported",
            fix="set it to 1; gpt_neox rotates a part of each head",
        )
    name = str(rope.get("rope_type", rope.get("type", "default")))
    name = kind.rope_types.get(name, _OLD_NAMES.get(name, name))
    if name == "default":
        return ours
    if name not in _FIELDS:
        raise InterchangeError(
            f"{kind.name} with rope_type: {name} is not supported", fix=f"use one of {', '.join(_FIELDS)}"
        )
    return ours | {"rope_scaling": {"kind": name} | _read_scaling(kind, name, theirs, rope)}


def _read_scaling(kind: Family, name: str, theirs: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    ours = {field: rope[_NAMES[field]] for field in _FIELDS[name] if _NAMES[field] in rope}
    length = theirs.get(kind.config.get("max_positions", ""), 0)
    if name in ("llama3", "yarn", "longrope"):
        top = theirs.get("original_max_position_embeddings")
        ours["original_max_positions"] = top or ours.get("original_max_positions", length)
    if name == "dynamic":
        ours["original_max_positions"] = length
    if name in ("yarn", "longrope") and "factor" not in ours:
        ours["factor"] = length / ours["original_max_positions"]
    return ours


def longest_sequence(max_positions: int, rope_scaling: Mapping[str, Any] | None) -> int:
    """Return the longest sequence of a model: with dynamic scaling their length is that of pretraining."""
    if rope_scaling is not None and rope_scaling["kind"] == "dynamic":
        return int(max_positions * rope_scaling.get("factor", 1.0))
    return max_positions


def write_rope(kind: Family, config: ModelConfig) -> dict[str, Any]:
    """Return their rotary keys, in the spelling of transformers 5 and in the one before it."""
    rope = _write_one(kind, config, config.rope_scaling)
    # Both spellings: readers before transformers 5 know only the second.
    old: dict[str, Any] = {kind.rope_keys["rope_theta"]: config.rope_theta}
    if kind.partial_rotary:
        old[kind.rope_keys["rope_fraction"]] = config.rope_fraction
    if config.rope_scaling is not None:
        old["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
        if "original_max_position_embeddings" in kind.defaults:
            old["original_max_position_embeddings"] = config.rope_scaling.original_max_positions
        if config.rope_scaling.kind == "dynamic":
            old[kind.config["max_positions"]] = config.rope_scaling.original_max_positions
    if kind.rope_by_type:
        theta = config.rope_theta if config.sliding_rope_theta is None else config.sliding_rope_theta
        sliding = {"rope_type": "default", "rope_theta": theta}
        old.pop("rope_scaling", None)
        old |= {"rope_local_base_freq": theta} if "rope_local_base_freq" in kind.defaults else {}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": sliding}} | old
    return {"rope_parameters": rope} | old


def _write_one(kind: Family, config: ModelConfig, scaling: RopeScaling | None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_fraction != 1.0 or kind.partial_rotary:
        rope["partial_rotary_factor"] = config.rope_fraction
    if scaling is None:
        return rope
    values = dataclasses.asdict(scaling)
    for field in _FIELDS[scaling.kind]:
        value = values[field]
        if value is not None:
            rope[_NAMES[field]] = list(value) if isinstance(value, tuple) else value
    return rope | {"rope_type": scaling.kind}
