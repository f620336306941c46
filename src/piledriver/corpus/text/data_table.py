"""Tables of names as YAML files beside the modules that use them."""

from __future__ import annotations

from importlib import resources
from typing import Any

from piledriver.core.config import load_yaml


def data_table(package: str, name: str) -> Any:
    """Return the content of the YAML file `name` of a package. Modules read theirs once, at import."""
    return load_yaml((resources.files(package) / name).read_text(encoding="utf-8"))


def names_by_value(table: dict[Any, str], separator: str | None = None) -> dict[str, Any]:
    """Return name -> value of a table that lists the names of each value in one string.

    >>> names_by_value({1: "part chapter", 2: "section"})
    {'part': 1, 'chapter': 1, 'section': 2}
    """
    return {name.strip(): value for value, names in table.items() for name in names.split(separator)}


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())
