"""piledriver: raw text to a measured, served language model, on whatever hardware there is.

The names below are imported when they are first used, so that `import piledriver` and the corpus commands stay light.
"""

from __future__ import annotations

import importlib
from typing import Any

# Public name -> the room that owns it. The verbs that Accelerate users import stand here too, so that a loop of theirs
# needs no more than another import line; `piledriver.compat.accelerate` mirrors their module paths.
_FACE: dict[str, str] = {
    "Accelerator": "piledriver.accelerator",
    "LocalSGD": "piledriver.accelerator",
    "World": "piledriver.runtime",
    "detect_world": "piledriver.runtime",
    "find_executable_batch_size": "piledriver.accelerator",
    "get_logger": "piledriver.accelerator",
    "release_memory": "piledriver.accelerator",
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
        "piledriver.accelerator",
    ),
    **dict.fromkeys(
        (
            "PartialState",
            "cpu_offload",
            "cpu_offload_with_hook",
            "debug_launcher",
            "disk_offload",
            "dispatch_model",
            "infer_auto_device_map",
            "init_empty_weights",
            "init_on_device",
            "load_checkpoint_and_dispatch",
            "load_checkpoint_in_model",
            "notebook_launcher",
            "skip_first_batches",
            "synchronize_rng_states",
        ),
        "piledriver.compat.accelerate",
    ),
    "set_seed": "piledriver.compat.accelerate.utils",
}

__all__ = ["__version__", *_FACE]


def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module(_FACE[name]), name)
    if name == "__version__":
        from importlib import metadata

        return metadata.version("piledriver")
    raise AttributeError(f"module 'piledriver' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
