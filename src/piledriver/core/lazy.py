"""Imports on first use: names of a package, so that a config can be checked before torch is imported; extras."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from piledriver.core.errors import MissingDependencyError


def import_optional(module: str, *, extra: str, purpose: str) -> Any:
    """Import and return a module of an optional package; raise `MissingDependencyError` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(module.partition(".")[0], extra=extra, purpose=purpose) from error


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
