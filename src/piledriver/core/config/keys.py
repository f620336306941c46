"""Keys of a config dataclass with type, default, allowed values and help, as the command line and the docs list them.

The help of a field is its attribute docstring: the string literal that follows it in the class body. Python drops these
strings, so they are read from the source of the class.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import functools
import inspect
import itertools
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from piledriver.core.config.build import to_mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigKey:
    """One key of a config."""

    name: str
    """Dotted, as in an override; `N` stands for the position in a list, `NAME` for any key of a mapping."""
    type: str
    """As in an annotation: `int`, `list[str]`, `float | null`."""
    required: bool
    default: Any
    """Plain data as YAML and JSON hold it; {} for a nested config, whose keys have their own; None if required."""
    choices: tuple[Any, ...]
    """Allowed values, empty where any value of the type is allowed."""
    help: str


def config_keys(cls: type) -> list[ConfigKey]:
    """List every key of a config dataclass, those of nested configs included, in the order of the class.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Run:
    ...     steps: int
    ...     betas: tuple[float, float] = (0.9, 0.95)
    >>> [(key.name, key.type, key.required, key.default) for key in config_keys(Run)]
    [('steps', 'int', True, None), ('betas', 'list[float, float]', False, [0.9, 0.95])]
    """
    return list(_keys(cls, "", ()))


@functools.cache
def attribute_docstrings(cls: type) -> Mapping[str, str]:
    """Return the attribute docstrings of a class and its bases by attribute, each on one line.

    A class without source, such as one typed at a prompt, has none.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        body = _class_body(base)
        for statement, following in itertools.pairwise(body):
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            value = following.value if isinstance(following, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[statement.target.id] = " ".join(value.value.split())
    return types.MappingProxyType(found)


def _class_body(cls: type) -> list[ast.stmt]:
    module = _module_tree(cls.__module__)
    body: list[ast.stmt] = [] if module is None else module.body
    for name in cls.__qualname__.split("."):
        if name == "<locals>":
            continue
        # The last one: a name that is defined again means its last definition.
        scopes = [node for node in _definitions(body) if node.name == name]
        if not scopes:
            return []
        body = scopes[-1].body
    return body


def _definitions(body: list[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the classes and functions of a body, also those inside its `if`, `try` and `with` blocks."""
    for statement in body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement
        else:
            for _, inner in ast.iter_fields(statement):
                if isinstance(inner, list):
                    yield from _definitions([node for node in inner if isinstance(node, ast.stmt)])


@functools.cache
def _module_tree(name: str) -> ast.Module | None:
    try:
        return ast.parse(inspect.getsource(sys.modules[name]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return None


def _keys(cls: type, prefix: str, above: tuple[type, ...]) -> Iterator[ConfigKey]:
    hints, docs = typing.get_type_hints(cls), attribute_docstrings(cls)
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        kind, required, default = hints[field.name], *_default(field)
        nested = _nested(kind, prefix + field.name)
        choices = field.metadata.get("choices", ())
        yield ConfigKey(
            name=prefix + field.name,
            type=_type_name(kind),
            required=required,
            default={} if any(isinstance(default, config) for config, _ in nested) else to_mapping(default),
            choices=_choices(kind) or tuple(choices() if callable(choices) else choices),
            help=docs.get(field.name) or _first_line(nested),
        )
        for config, name in nested:
            if config not in above:
                yield from _keys(config, f"{name}.", (*above, cls))


def _default(field: dataclasses.Field[Any]) -> tuple[bool, Any]:
    if field.default is not dataclasses.MISSING:
        return False, field.default
    if field.default_factory is not dataclasses.MISSING:
        return False, field.default_factory()
    return True, None


def _nested(kind: Any, name: str) -> list[tuple[type, str]]:
    """Return the config dataclasses that a field may hold, each with the dotted name of its place."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return [(kind, name)]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (list, tuple):
        name += ".N"
    elif origin in (dict, Mapping):
        name += ".NAME"
    return [found for argument in arguments for found in _nested(argument, name)]


def _first_line(nested: list[tuple[type, str]]) -> str:
    return (inspect.getdoc(nested[0][0]) or "").partition("\n")[0] if nested else ""


def _choices(kind: Any) -> tuple[Any, ...]:
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return tuple(member.value for member in kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(kind) if member is not type(None)]
        return _choices(members[0]) if len(members) == 1 else ()
    return ()


_YAML_NAMES = {tuple: "list", Mapping: "dict"}


def _type_name(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is type(None):
        return "null"
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_type_name, arguments))
    if origin is typing.Literal:
        return " | ".join(repr(value) if isinstance(value, str) else str(value).lower() for value in arguments)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " | ".join(repr(member.value) for member in kind)
    if origin is not None:
        inner = ", ".join(_type_name(argument) for argument in arguments if argument is not Ellipsis)
        return f"{_YAML_NAMES.get(origin, origin.__name__)}[{inner}]"
    return "mapping" if dataclasses.is_dataclass(kind) else getattr(kind, "__name__", str(kind))
