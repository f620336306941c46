"""Floor 5: the facade that a user's loop talks to. It delegates: no strategy code lives here.

Read `accelerator.py` first; each of the other files answers one question that it asks.
"""

from __future__ import annotations

import importlib
from typing import Any

_FACE = {
    "Accelerator": "accelerator",
    "GradientState": "accumulation",
    "LocalSGD": "local_sgd",
    "PreparedOptimizer": "optimizer",
    "PreparedScheduler": "scheduler",
    "find_executable_batch_size": "memory",
    "release_memory": "memory",
    "get_logger": "logging",
    **dict.fromkeys(
        (
            "AutocastKwargs",
            "DDPCommunicationHookType",
            "DataLoaderConfiguration",
            "DistributedDataParallelKwargs",
            "DistributedType",
            "GradScalerKwargs",
            "GradientAccumulationPlugin",
            "InitProcessGroupKwargs",
            "ProfileKwargs",
            "ProjectConfiguration",
            "TorchDynamoPlugin",
        ),
        "options",
    ),
}

__all__ = list(_FACE)


def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module(f"piledriver.accelerator.{_FACE[name]}"), name)
    raise AttributeError(f"module 'piledriver.accelerator' has no attribute {name!r}")
