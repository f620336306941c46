"""`accelerate.utils`: a name is looked up in the modules below on first use."""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = (
    "dataclasses",
    "operations",
    "environment",
    "imports",
    "versions",
    "constants",
    "memory",
    "random",
    "other",
    "modeling",
    "offload",
    "tqdm",
    "launch",
    "fsdp_utils",
    "deepspeed",
)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "ParallelismConfig":
        return importlib.import_module("piledriver.compat.accelerate.parallelism_config").ParallelismConfig
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    for module_name in _MODULES:
        module = importlib.import_module(f"{__name__}.{module_name}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
