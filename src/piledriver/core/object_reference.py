"""Object references, `module:attribute` strings as in packaging metadata: how registries, tasks and worker processes
name a function that another process imports."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def object_reference(function: Callable[..., Any]) -> str:
    """Return the reference of a module-level function or class.

    >>> import os.path
    >>> load_object(object_reference(os.path.basename)) is os.path.basename
    True
    """
    reference = f"{function.__module__}:{function.__qualname__}"
    if "." in function.__qualname__ or function.__module__ == "__main__":
        raise ValueError(f"{reference} cannot be imported by another process; define it at the top of a module")
    return reference


def load_object(reference: str) -> Any:
    """Import the object that a reference names."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)
