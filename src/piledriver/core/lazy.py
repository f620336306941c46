"""Packages whose names are imported on first use, so that a config can be checked before torch is imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package; `modules` maps each name to the module below that has it.

    >>> get, names = lazy_names("json", {"JSONDecoder": "decoder"})
    >>> get("JSONDecoder").__name__, names()
    ('JSONDecoder', ['JSONDecoder'])
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)  # found without this function from now on
        return value

    return get, lambda: sorted(modules)
