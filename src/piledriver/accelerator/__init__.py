"""Floor 5: the facade that a user's loop talks to. It delegates to the engine; read `accelerator.py` first."""

from __future__ import annotations

import importlib
from typing import Any

_FACE = {
    "Accelerator": "accelerator",
    "GradientState": "state.accumulation",
    "PreparedOptimizer": "wrappers.optimizer",
    "PreparedScheduler": "wrappers.scheduler",
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
        "options.handlers",
    ),
}

_MODULES = {name: f"piledriver.accelerator.{module}" for name, module in _FACE.items()}
_MODULES["LocalSGD"] = "piledriver.engine.data_parallel.local_sgd"

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'piledriver.accelerator' has no attribute {name!r}")
