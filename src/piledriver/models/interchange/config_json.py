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
from piledriver.models.interchange.conversions import CONVERSIONS
from piledriver.models.interchange.errors import InterchangeError
from piledriver.models.interchange.families import Family, family, family_names, family_of, variants_of, with_defaults
from piledriver.models.interchange.quantised_layers import check_quantisation
from piledriver.models.interchange.rope_json import longest_sequence, read_rope, write_rope
from piledriver.models.interchange.windows_json import read_window, write_window

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu_squared",
    "xielu": "xielu",
}
_ACTIVATIONS_BACK = {ours: theirs for theirs, ours in _ACTIVATIONS.items() if theirs not in ("swish", "gelu_fast")}
_ACTIVATIONS_BACK["gelu_tanh"] = "gelu_new"
_REQUIRED = ("vocab_size", "dim", "layers", "heads")
# Fields that `ModelConfig` derives where they are 0, as transformers does where they are null.
_DERIVED = ("kv_heads", "head_dim", "mlp_dim")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_config(theirs: Mapping[str, Any]) -> ModelConfig:
    """Return the `ModelConfig` of the content of a `config.json`."""
    kind, given = family_of(theirs), theirs
    theirs = with_defaults(kind, theirs)
    _check_supported(kind, theirs)
    ours: dict[str, Any] = {}
    for field, value in kind.constants.items():
        _put(ours, field, value)
    for field, key in kind.config.items():
        if isinstance(key, list):
            value = CONVERSIONS[key[0]].read(theirs, *key[1:])
        else:
            value = theirs.get(key)
            if field in _REQUIRED and value is None:
                raise InterchangeError(f"config.json has no {key!r}", fix=f"add it: a {kind.name} checkpoint needs it")
            if key not in theirs:
                continue
        value = 0 if field in _DERIVED and value is None else value
        _put(ours, field, _ACTIVATIONS.get(str(value), value) if field == "activation" else value)
    if ours.get("positions") == "rotary":
        ours |= read_rope(kind, theirs, given)
        if "max_positions" in ours:
            ours["max_positions"] = longest_sequence(ours["max_positions"], ours.get("rope_scaling"))
    ours |= read_window(kind, theirs, int(ours["layers"]))
    try:
        return from_mapping(ModelConfig, ours, where="config.json")
    except ConfigError as error:
        what = error.what
        for field, key in kind.config.items():
            what = what.replace(repr(field), repr(key if isinstance(key, str) else key[1]))
        raise ConfigError(what, fix=error.fix) from error


def _check_supported(kind: Family, theirs: Mapping[str, Any]) -> None:
    if theirs.get("quantization_config"):
        check_quantisation(theirs["quantization_config"])
    for key, value in kind.refuses.items():
        if theirs.get(key) == value:
            raise InterchangeError(
                f"{kind.name} with {key}: {value} is not supported", fix="export it without that option"
            )
    for key, value in kind.requires.items():
        wanted = theirs.get(value[1:]) if isinstance(value, str) and value.startswith("$") else value
        if theirs.get(key) not in (None, wanted):
            raise InterchangeError(
                f"{kind.name} with {key}: {theirs[key]} is not supported", fix=f"only {wanted} can be represented"
            )


def read_token_ids(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the bos, eos and pad token ids of the content of a `config.json`, as transformers reads them."""
    known = with_defaults(family_of(theirs), theirs)
    return {key: known.get(key) for key in TOKEN_IDS}


def write_config(config: ModelConfig, model_type: str | None = None) -> dict[str, Any]:
    """Return the content of a `config.json` that reads back to `config`. Default: the first family that fits."""
    names = [model_type] if model_type is not None else family_names()
    differences: dict[str, list[str]] = {}
    for kind in (variant for name in names for variant in variants_of(family(name))):
        try:
            theirs = _write_as(kind, config)
            back = read_config(theirs)
        except (PiledriverError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            # A conversion of another family's fields may fail in any way: the config is then not of that family.
            differs = [error.what if isinstance(error, PiledriverError) else "fields that it does not have"]
        else:
            differs = [
                field.name
                for field in dataclasses.fields(ModelConfig)
                if getattr(back, field.name) != getattr(config, field.name)
            ]
            if not differs:
                return theirs
        if kind.name not in differences or len(differs) < len(differences[kind.name]):
            differences[kind.name] = differs
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
        if isinstance(key, list):
            theirs |= CONVERSIONS[key[0]].write(value, config, *key[1:])
        elif field == "activation":
            theirs[key] = _write_activation(value, kind.defaults.get(key))
        else:
            theirs[key] = value
    if config.positions == "rotary":
        theirs |= write_rope(kind, config)
    return theirs | write_window(kind, config) | kind.when


def _write_activation(value: str, usual: Any) -> str:
    """Return their name of an activation, the family's usual one where it has several."""
    return str(usual) if _ACTIVATIONS.get(str(usual)) == value else _ACTIVATIONS_BACK[value]


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
