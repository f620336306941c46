"""Hugging Face Accelerate's module paths and names, implemented by piledriver's rooms.

What is implemented here are its shared states (`state.py`) and the signatures that differ from ours.

`import piledriver.compat.accelerate as accelerate` in a script, or `piledriver launch --alias-accelerate script.py`
without editing it. docs/accelerate.md lists the differences.
"""

from __future__ import annotations

import importlib
from typing import Any

# The version of Accelerate whose names are mirrored.
__version__ = "1.15.0"
# Where packages that check the origin of a distribution expect it to come from.
__url__ = "https://github.com/huggingface/accelerate"

_FACE = {
    "Accelerator": "accelerator",
    "PartialState": "state",
    "skip_first_batches": "data_loader",
    "debug_launcher": "launchers",
    "notebook_launcher": "launchers",
    "ParallelismConfig": "parallelism_config",
    "LocalSGD": "local_sgd",
    "prepare_pippy": "inference",
    **dict.fromkeys(
        (
            "cpu_offload",
            "cpu_offload_with_hook",
            "disk_offload",
            "dispatch_model",
            "init_empty_weights",
            "init_on_device",
            "load_checkpoint_and_dispatch",
        ),
        "big_modeling",
    ),
    **dict.fromkeys(
        (
            "AutocastKwargs",
            "DDPCommunicationHookType",
            "DataLoaderConfiguration",
            "DeepSpeedPlugin",
            "DistributedDataParallelKwargs",
            "DistributedType",
            "FullyShardedDataParallelPlugin",
            "GradScalerKwargs",
            "GradientAccumulationPlugin",
            "InitProcessGroupKwargs",
            "ProfileKwargs",
            "find_executable_batch_size",
            "infer_auto_device_map",
            "is_rich_available",
            "load_checkpoint_in_model",
            "synchronize_rng_states",
        ),
        "utils",
    ),
}

__all__ = [*_FACE, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module(f"{__name__}.{_FACE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
