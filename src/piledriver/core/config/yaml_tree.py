"""Parse YAML and `key=value` overrides to plain data with the file and line of every key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from piledriver.core.errors import ConfigError, UsageError

COMMAND_LINE = "command line"
KeyPath = tuple[str | int, ...]


@dataclass
class ConfigTree:
    """Nested dicts, lists and scalars, with the origin of each key."""

    data: dict[str, Any]
    origins: dict[KeyPath, str]
    default_origin: str

    def where(self, at: KeyPath) -> str:
        """Return the file and line (or 'command line') of a key, or of its nearest parent that has one."""
        while at:
            if at in self.origins:
                return self.origins[at]
            at = at[:-1]
        return self.default_origin

    def put(self, dotted: str, value: Any) -> None:
        """Set a key by its dotted name, creating missing mappings. A list item is named by its position."""
        at: tuple[str | int, ...] = ()
        here: Any = self.data
        *parents, last = dotted.split(".")
        for name in parents:
            at = (*at, name)
            if isinstance(here, list):
                here = here[_list_index(here, name, dotted)]
                continue
            if here.get(name) is None:
                here[name] = {}
                self.origins[at] = COMMAND_LINE
            here = here[name]
            if not isinstance(here, (dict, list)):
                raise ConfigError(
                    f"{COMMAND_LINE}: {dotted!r} needs a mapping at {'.'.join(map(str, at))!r}, which is {here!r}",
                    fix="set that key to a mapping",
                )
        if isinstance(here, list):
            here[_list_index(here, last, dotted)] = value
        else:
            here[last] = value
        self.origins[tuple(dotted.split("."))] = COMMAND_LINE


def _list_index(items: list[Any], name: str, dotted: str) -> int:
    if not name.isdigit() or int(name) >= len(items):
        raise ConfigError(
            f"{COMMAND_LINE}: {dotted!r}: {name!r} is not a position in a list of {len(items)}",
            fix=f"use 0 to {len(items) - 1}",
        )
    return int(name)


class _Loader(yaml.SafeLoader):
    """Reads dates, times and numbers with colons as text: 2026-11-17 names a folder, and 2:4 is not 124."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: tuple[bool, bool]) -> Any:
        """Return the tag of a value that has none of its own."""
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]
        number = tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if tag == "tag:yaml.org,2002:timestamp" or (number and ":" in value):
            return self.DEFAULT_SCALAR_TAG
        return tag


def parse_yaml(text: str, name: str) -> ConfigTree:
    """Parse a YAML mapping. Duplicate keys, of which YAML loaders silently keep one, are an error."""
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}" if mark is not None else name
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
        raise ConfigError(
            f"{place}: not valid YAML: {problem}", fix="check the indentation, colons and quotes there"
        ) from error
    if root is None:
        return ConfigTree({}, {}, name)
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{name}:{root.start_mark.line + 1}: the file must hold a mapping", fix="write 'key: value' lines"
        )
    tree = ConfigTree({}, {}, name)
    tree.data = _plain(root, (), tree, depth=0)
    return tree


def _plain(node: yaml.Node, at: KeyPath, tree: ConfigTree, depth: int) -> Any:
    if depth > 100:
        # Also the case of an anchor that contains itself.
        raise ConfigError(
            f"{tree.default_origin}:{node.start_mark.line + 1}: nested deeper than 100 levels", fix="flatten the file"
        )
    if isinstance(node, yaml.MappingNode):
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = f"{tree.default_origin}:{key_node.start_mark.line + 1}"
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{place}: keys must be plain text", fix="quote the key")
            if key_node.value in values:
                raise ConfigError(f"{place}: {key_node.value!r} is given twice", fix="keep one of the two")
            tree.origins[(*at, key_node.value)] = place
            values[key_node.value] = _plain(value_node, (*at, key_node.value), tree, depth + 1)
        return values
    if isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            tree.origins[(*at, i)] = f"{tree.default_origin}:{item.start_mark.line + 1}"
        return [_plain(item, (*at, i), tree, depth + 1) for i, item in enumerate(node.value)]
    return _scalar(node, f"{tree.default_origin}:{node.start_mark.line + 1}")


def _scalar(node: yaml.Node, place: str) -> Any:
    try:
        return yaml.constructor.SafeConstructor().construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"{place}: cannot read the value {getattr(node, 'value', '')!r}", fix="quote it if it is text"
        ) from error


def parse_override(text: str) -> tuple[str, Any]:
    """Return key and value of `key=value`; the value is YAML, as in a file."""
    key, equals, value = text.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise UsageError(
            f"{text!r} is not an override", fix="write key=value, for example steps=100 or optimizer.lr=3e-4"
        )
    try:
        return key, yaml.load(value, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{COMMAND_LINE}: {key!r}: cannot read the value {value!r}", fix="quote it if it is text"
        ) from error


def to_yaml_text(data: Any) -> str:
    """Return plain data as YAML, with keys in the given order."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, default_flow_style=False, width=120)
