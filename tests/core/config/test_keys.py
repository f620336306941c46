"""Attribute docstrings: of nested, inherited and local classes, and of classes without source."""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal

from piledriver.core.config.keys import attribute_docstrings, config_keys


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner:
    """A nested config.

    With more to say.
    """

    depth: int = 2
    """How deep
    it goes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    name: str
    """The base's."""
    seed: int = 0
    """The base's seed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer(Base):
    name: str = "outer"
    inner: Inner = dataclasses.field(default_factory=Inner)
    items: list[Inner] = dataclasses.field(default_factory=list)
    """Several."""
    table: dict[str, Inner] | None = None
    """By name."""
    mode: Literal["a", "b"] | None = "a"
    """A choice."""
    colour: Colour = Colour.RED
    """Another."""
    kind: str = dataclasses.field(default="x", metadata={"choices": lambda: ["x", "y"]})
    """From a registry."""
    hidden: int = dataclasses.field(default=0, init=False)


def test_keys_of_nested_and_inherited_configs() -> None:
    keys = {key.name: key for key in config_keys(Outer)}
    assert list(keys) == [
        "name",
        "seed",
        "inner",
        "inner.depth",
        "items",
        "items.N.depth",
        "table",
        "table.NAME.depth",
        "mode",
        "colour",
        "kind",
    ]
    assert keys["name"].help == "The base's."
    assert (keys["name"].required, keys["name"].default) == (False, "outer")
    assert keys["inner"].help == "A nested config."
    assert keys["inner.depth"].help == "How deep it goes."
    assert (keys["inner"].type, keys["inner"].default) == ("mapping", {})
    assert keys["items"].type == "list[mapping]"
    assert (keys["mode"].type, keys["mode"].choices) == ("'a' | 'b' | null", ("a", "b"))
    assert (keys["colour"].choices, keys["colour"].default) == (("red", "blue"), "red")
    assert keys["kind"].choices == ("x", "y")


def test_docstrings_of_classes_inside_functions_and_without_source() -> None:
    if True:

        class Local:
            depth: int = 0
            """A local class's."""

    assert attribute_docstrings(Local) == {"depth": "A local class's."}
    assert attribute_docstrings(type("Made", (), {})) == {}
