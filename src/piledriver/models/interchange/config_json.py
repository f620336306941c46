"""Convert `config.json` of transformers to a `ModelConfig` and back.

Writing is verified by reading: a config is exported to a family only if that family's file reads back to an equal
config, so that a setting which a family cannot represent is an error and never dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from piledriver.core.config import from_mapping, to_mapping
from piledriver.core.errors import ConfigError, PiledriverError
from piledriver.models.config import ModelConfig
from piledriver.models.interchange.families import Family, families, family

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
}
_ACTIVATIONS_BACK = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "relu_squared": "relu2"}
_REQUIRED = ("vocab_size", "dim", "layers", "heads")
# Fields that `ModelConfig` derives where they are 0, as transformers does where they are null.
_DERIVED = ("kv_heads", "head_dim", "mlp_dim")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class InterchangeError(PiledriverError):
    """A checkpoint or config that cannot be converted without changing what the model computes."""


def read_config(theirs: Mapping[str, Any]) -> ModelConfig:
    """Return the `ModelConfig` of the content of a `config.json`."""
    kind = family(str(theirs.get("model_type")))
    theirs = {**kind.defaults, **theirs}  # null is a value: only keys that are absent have the default
    for key, value in kind.refuses.items():
        if theirs.get(key) == value:
            raise InterchangeError(
                f"{kind.name} with {key}: {value} is not supported", fix="export it without that option"
            )
    ours: dict[str, Any] = dict(kind.constants)
    for field, key in kind.config.items():
        value = theirs.get(key)
        if field in _REQUIRED and value is None:
            raise InterchangeError(f"config.json has no {key!r}", fix=f"add it: a {kind.name} checkpoint needs it")
        if key in theirs:
            value = 0 if field in _DERIVED and value is None else value
            _put(ours, field, _ACTIVATIONS.get(str(value), value) if field == "activation" else value)
    if ours.get("positions") == "rotary":
        ours |= _read_rope(kind, theirs)
    ours |= _read_window(kind, theirs)
    try:
        return from_mapping(ModelConfig, ours, where="config.json")
    except ConfigError as error:
        what = error.what
        for field, key in kind.config.items():
            what = what.replace(repr(field), repr(key))
        raise ConfigError(what, fix=error.fix) from error


def read_token_ids(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bos, eos and pad token ids of the content of a `config.json`, as transformers reads them."""
    known = {**family(str(theirs.get("model_type"))).defaults, **theirs}
    return {key: known.get(key) for key in TOKEN_IDS}


def write_config(config: ModelConfig, model_type: str | None = None) -> dict[str, Any]:
    """Return the content of a `config.json` that reads back to `config`. Default: the first family that fits."""
    candidates = [family(model_type)] if model_type is not None else list(families().values())
    differences: dict[str, list[str]] = {}
    for kind in candidates:
        theirs = _write_as(kind, config)
        try:
            back = read_config(theirs)
        except PiledriverError as error:
            differences[kind.name] = [error.what]
            continue
        differences[kind.name] = [
            field.name
            for field in dataclasses.fields(ModelConfig)
            if getattr(back, field.name) != getattr(config, field.name)
        ]
        if not differences[kind.name]:
            return theirs
    nearest = min(differences, key=lambda name: len(differences[name]))
    raise InterchangeError(
        f"no family can represent this config: {nearest} differs in {', '.join(differences[nearest])}",
        fix="change those fields, or save the model as a piledriver checkpoint",
    )


def _write_as(kind: Family, config: ModelConfig) -> dict[str, Any]:
    ours = to_mapping(config)
    theirs: dict[str, Any] = {"model_type": kind.name, "architectures": [kind.architecture], **kind.writes}
    for field, key in kind.config.items():
        value = _get(ours, field)
        theirs[key] = _ACTIVATIONS_BACK[value] if field == "activation" else value
    if config.positions == "rotary":
        theirs |= _write_rope(kind, config)
    return theirs | _write_window(kind, config)


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[last] = value


def _get(tree: dict[str, Any], dotted: str) -> Any:
    value: Any = tree
    for name in dotted.split("."):
        value = None if value is None else value.get(name)
    return value


def _read_rope(kind: Family, theirs: Mapping[str, Any]) -> dict[str, Any]:
    # transformers 5 keeps one dict; before it there were rope_theta, rope_scaling and names of single families.
    rope = {**(theirs.get("rope_scaling") or {}), **(theirs.get("rope_parameters") or {})}
    rope = {key: value for key, value in rope.items() if value is not None}
    old = {field: theirs[key] for field, key in kind.rope_keys.items() if theirs.get(key) is not None}
    ours: dict[str, Any] = {
        "rope_theta": rope.get("rope_theta", theirs.get("rope_theta") or old.get("rope_theta", 10000.0)),
        "rope_fraction": rope.get("partial_rotary_factor", old.get("rope_fraction", 1.0)),
    }
    if ours["rope_fraction"] != 1.0 and not kind.partial_rotary:
        # transformers accepts the setting for these too, and then rotates whole heads.
        raise InterchangeError(
            f"{kind.name} with partial_rotary_factor {ours['rope_fraction']:g} is not supported",
            fix="set it to 1; gpt_neox rotates a part of each head",
        )
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling == "default":
        return ours
    if scaling not in ("llama3", "linear"):
        raise InterchangeError(
            f"rotary scaling {scaling!r} of {kind.name} is not supported", fix="use llama3 or linear"
        )
    names = {
        "factor": "factor",
        "low_frequency_factor": "low_freq_factor",
        "high_frequency_factor": "high_freq_factor",
        "original_max_positions": "original_max_position_embeddings",
    }
    return ours | {
        "rope_scaling": {"kind": scaling} | {our: rope[their] for our, their in names.items() if their in rope}
    }


def _write_rope(kind: Family, config: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_fraction != 1.0 or kind.partial_rotary:
        rope["partial_rotary_factor"] = config.rope_fraction
    if config.rope_scaling is not None:
        rope |= {"rope_type": config.rope_scaling.kind, "factor": config.rope_scaling.factor}
    if config.rope_scaling is not None and config.rope_scaling.kind == "llama3":
        rope |= {
            "low_freq_factor": config.rope_scaling.low_frequency_factor,
            "high_freq_factor": config.rope_scaling.high_frequency_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_positions,
        }
    # Both spellings: readers before transformers 5 know only the second.
    old: dict[str, Any] = {kind.rope_keys["rope_theta"]: config.rope_theta}
    if kind.partial_rotary:
        old[kind.rope_keys["rope_fraction"]] = config.rope_fraction
    if config.rope_scaling is not None:
        old["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {"rope_parameters": rope} | old


def _read_window(kind: Family, theirs: Mapping[str, Any]) -> dict[str, Any]:
    window = theirs.get("sliding_window")
    if kind.window == "none" or window is None or (kind.window == "by_layer" and not theirs.get("use_sliding_window")):
        return {}
    if kind.window == "all":
        return {"sliding_window": window}
    layers = int(theirs["num_hidden_layers"])
    first_windowed = int(theirs["max_window_layers"])
    types = theirs.get("layer_types") or ["full_attention"] * min(first_windowed, layers)
    full = [layer for layer, name in enumerate(types) if name == "full_attention"]
    # No block uses the window: it is not a part of the model.
    return {} if len(full) == layers else {"sliding_window": window, "full_attention_layers": full}


def _write_window(kind: Family, config: ModelConfig) -> dict[str, Any]:
    if kind.window == "none":
        return {}
    if kind.window == "all":
        return {"sliding_window": config.sliding_window}
    windowed = [config.window_of(layer) is not None for layer in range(config.layers)]
    return {
        "use_sliding_window": any(windowed),
        "sliding_window": config.sliding_window,
        "max_window_layers": windowed.index(True) if any(windowed) else config.layers,
        "layer_types": ["sliding_attention" if slides else "full_attention" for slides in windowed],
    }
