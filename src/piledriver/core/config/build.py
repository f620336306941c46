"""Build frozen, keyword-only config dataclasses from YAML and `key=value` overrides.

Precedence: defaults, file, command line. A config class is defined beside what it configures; its attribute docstrings
are its help (`keys.py`). An unknown key is an error with its file and line and the nearest known key. The resolved
config prints as YAML that loads back to an equal value.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from piledriver.core import storage
from piledriver.core.config.yaml_tree import COMMAND_LINE, ConfigTree, parse_override, parse_yaml, to_yaml_text
from piledriver.core.errors import ConfigError, PiledriverError, suggest

C = TypeVar("C")


def load_config(cls: type[C], path: storage.Location | None = None, overrides: Iterable[str] = ()) -> C:
    """Build `cls` from a YAML file and `key=value` overrides (dots descend into nested configs).

    >>> import dataclasses
    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Run:
    ...     steps: int = 100
    >>> load_config(Run, overrides=["steps=20"])
    Run(steps=20)
    """
    tree = parse_yaml(storage.read_text(path), str(path)) if path is not None else ConfigTree({}, {}, COMMAND_LINE)
    for override in overrides:
        key, value = parse_override(override)
        tree.put(key, value)
    return build(cls, tree)


def build(cls: type[C], tree: ConfigTree) -> C:
    """Build a config dataclass from parsed data with the origin of each key."""
    return cast(C, _value(cls, tree.data, (), tree))


def from_mapping(cls: type[C], data: Mapping[str, Any], where: str = "the mapping") -> C:
    """Build a config dataclass from plain nested data."""
    return build(cls, ConfigTree(dict(data), {}, where))


def to_mapping(config: Any) -> Any:
    """Return a config as nested dicts, lists and scalars, which YAML and JSON can hold."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {
            field.name: to_mapping(getattr(config, field.name)) for field in dataclasses.fields(config) if field.init
        }
    if isinstance(config, Mapping):
        return {str(key): to_mapping(value) for key, value in config.items()}
    if isinstance(config, (list, tuple)):
        return [to_mapping(item) for item in config]
    if isinstance(config, enum.Enum):
        return config.value
    return str(config) if isinstance(config, Path) else config


def to_yaml(config: Any) -> str:
    """Return a config as YAML, which `load_config` reads back to an equal value."""
    return to_yaml_text(to_mapping(config))


def save_config(config: Any, path: storage.Location) -> None:
    """Write a config as a YAML file."""
    storage.write_text(path, to_yaml(config))


_Path = tuple[str | int, ...]


def _value(kind: Any, data: Any, at: _Path, tree: ConfigTree) -> Any:
    """Check `data` against the annotation `kind` and convert it; `at` is the key path for error messages."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if origin is typing.Annotated:
        return _value(arguments[0], data, at, tree)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, data, at, tree)
    if origin is typing.Literal:
        if data not in arguments:
            raise _mismatch(f"one of {', '.join(map(repr, arguments))}", data, at, tree)
        return data
    if origin in (list, tuple) or kind in (list, tuple):
        return _sequence(origin or kind, arguments, data, at, tree)
    if origin in (dict, Mapping) or kind is dict:
        return _mapping(arguments, data, at, tree)
    if dataclasses.is_dataclass(kind):
        return _dataclass(cast(type, kind), data, at, tree)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enum(kind, data, at, tree)
    return _scalar(kind, data, at, tree)


def _scalar(kind: Any, data: Any, at: _Path, tree: ConfigTree) -> Any:
    if kind is float and data != data:
        raise _mismatch("a number", data, at, tree)
    if kind is float and isinstance(data, str):
        # YAML 1.1 reads `1e-3` as a string.
        try:
            return _scalar(float, float(data), at, tree)
        except ValueError:
            raise _mismatch("a number", data, at, tree) from None
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if kind is Path and isinstance(data, str):
        return Path(data)
    if kind is int and isinstance(data, float) and data.is_integer():
        return int(data)
    if kind is int and isinstance(data, str) and _as_whole_number(data) is not None:
        return _as_whole_number(data)
    if not isinstance(kind, type):
        raise TypeError(f"config fields cannot be annotated {kind!r}")
    if kind is str and isinstance(data, (bool, int, float)):
        quoted = f"'{_dotted(at)}=\"...\"'" if tree.where(at) == COMMAND_LINE else '"..."'
        raise _mismatch(f"text, in quotes: {quoted}", data, at, tree)
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise _mismatch(_KIND_NAMES.get(kind, kind.__name__), data, at, tree)
    return data


def _as_whole_number(text: str) -> int | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else None


_KIND_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


def _kind_name(kind: Any) -> str:
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    return _KIND_NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def _union(arguments: tuple[Any, ...], data: Any, at: _Path, tree: ConfigTree) -> Any:
    if data is None and type(None) in arguments:
        return None
    members = [member for member in arguments if member is not type(None)]
    exact = [member for member in members if isinstance(member, type) and type(data) is member]
    failures: list[ConfigError] = []
    for member in exact or members:
        try:
            return _value(member, data, at, tree)
        except ConfigError as error:
            failures.append(error)
    # The message of a single candidate is more precise: it may name a nested key.
    nested = [
        failure
        for failure, member in zip(failures, members, strict=False)
        if dataclasses.is_dataclass(member) and isinstance(data, Mapping)
    ]
    if len(failures) == 1 or nested:
        raise nested[0] if nested else failures[0]
    names = " or ".join(map(_kind_name, members))
    raise _mismatch(names, data, at, tree)


def _sequence(kind: type, arguments: tuple[Any, ...], data: Any, at: _Path, tree: ConfigTree) -> Any:
    if not isinstance(data, (list, tuple)):
        raise _mismatch("a list", data, at, tree)
    if kind is tuple and arguments and arguments[-1] is not Ellipsis:
        if len(data) != len(arguments):
            raise _mismatch(f"a list of {len(arguments)}", data, at, tree)
        return tuple(
            _value(item_kind, item, (*at, i), tree)
            for i, (item_kind, item) in enumerate(zip(arguments, data, strict=True))
        )
    item_kind = arguments[0] if arguments else Any
    return kind(_value(item_kind, item, (*at, i), tree) for i, item in enumerate(data))


def _mapping(arguments: tuple[Any, ...], data: Any, at: _Path, tree: ConfigTree) -> Any:
    if not isinstance(data, Mapping):
        raise _mismatch("a mapping", data, at, tree)
    key_kind, value_kind = arguments or (str, Any)
    return {
        _value(key_kind, key, (*at, key), tree): _value(value_kind, value, (*at, key), tree)
        for key, value in data.items()
    }


def _enum(kind: type[enum.Enum], data: Any, at: _Path, tree: ConfigTree) -> Any:
    try:
        return kind(data)
    except ValueError:
        raise _mismatch(f"one of {', '.join(repr(member.value) for member in kind)}", data, at, tree) from None


def _dataclass(cls: type, data: Any, at: _Path, tree: ConfigTree) -> Any:
    if isinstance(data, cls):
        return data
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise _mismatch(f"a mapping with the keys of {cls.__name__}", data, at, tree)
    if hasattr(cls, "upgraded"):
        data = cls.upgraded(data)
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in data:
        if key not in fields:
            raise ConfigError(
                f"{tree.where((*at, key))}: unknown key {_dotted((*at, key))!r}", fix=suggest(str(key), fields)
            )
    missing = [name for name, field in fields.items() if name not in data and not _has_default(field)]
    if missing:
        where, key = tree.where(at), _dotted((*at, missing[0]))
        raise ConfigError(
            f"{where}: {key!r} is required", fix=f"add {key}=..." if where == COMMAND_LINE else f"add '{key}: ...'"
        )
    values = {name: _value(hints[name], value, (*at, name), tree) for name, value in data.items()}
    try:
        return cls(**values)
    except PiledriverError as error:
        raise ConfigError(f"{tree.where(at)}: {error.what}", fix=error.fix) from error
    except ValueError as error:
        # `__post_init__` of the config names the conflict; add the place.
        raise ConfigError(f"{tree.where(at)}: {error}") from error


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _mismatch(expected: str, data: Any, at: _Path, tree: ConfigTree) -> ConfigError:
    shown = repr(data) if len(repr(data)) <= 60 else repr(data)[:57] + "..."
    return ConfigError(f"{tree.where(at)}: {_dotted(at) or 'the file'!r} is {shown}", fix=f"it must be {expected}")


def _dotted(at: _Path) -> str:
    return ".".join(map(str, at))
