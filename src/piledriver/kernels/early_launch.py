"""Programmatic dependent launch: a kernel starts while its predecessor finishes, and waits before it reads its results.

In a chain of short kernels the start of each one costs about as much as its work. On Hopper and later GPUs a kernel
that was launched so may begin early: it prefetches what does not depend on its predecessor (weights), then waits for
the predecessor to complete. Every kernel that is launched early must wait before its first dependent access.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def early_launch(device: torch.device) -> dict[str, Any]:
    """Return launch options of a Triton kernel with the constant `EARLY`: whether it starts early on this device."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
