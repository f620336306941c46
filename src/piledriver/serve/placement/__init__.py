"""Place a model's weights: build without memory, map modules to devices, keep the rest on the CPU or on disk.

The names are the field's (`device_map`, `dispatch_model`, `cpu_offload`), with the signatures of Hugging Face
Accelerate, whose paths `piledriver.compat.accelerate` mirrors. Read `dispatch.py` first.
"""

from piledriver.serve.placement.dispatch import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)
from piledriver.serve.placement.empty_weights import init_empty_weights, init_on_device
from piledriver.serve.placement.errors import PlacementError, StrictLoadError
from piledriver.serve.placement.load_checkpoint import load_checkpoint_in_model
from piledriver.serve.placement.maps.device_map import infer_auto_device_map

__all__ = [
    "PlacementError",
    "StrictLoadError",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
]
