"""Counters of this rank's accelerator: torch's allocator, and NVML's or torch's view of the device."""

from __future__ import annotations

import contextlib
from typing import Any


class DeviceCounters:
    """Reads the counters of one CUDA device; without one, or before torch has initialised it, `read` returns {}.

    Looking must not create a CUDA context: that would cost memory, and break a later fork.
    """

    def __init__(self, index: int | None = None) -> None:
        self._index = index
        self._nvml: Any = None
        self._looked = False

    def read(self) -> dict[str, float]:
        """Return the current values."""
        import torch

        if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return {}
        if self._index is None:
            self._index = torch.cuda.current_device()
        if not self._looked:
            self._looked = True
            with contextlib.suppress(OSError, AttributeError, RuntimeError):
                from piledriver.observe.system.nvml import NvmlDevice

                self._nvml = NvmlDevice(str(torch.cuda.get_device_properties(self._index).uuid))
        return {
            "device/allocated_bytes": torch.cuda.memory_allocated(self._index),
            "device/reserved_bytes": torch.cuda.memory_reserved(self._index),
            "device/peak_bytes": torch.cuda.max_memory_allocated(self._index),
            **(self._nvml.read() if self._nvml is not None else _by_torch(self._index)),
        }


def _by_torch(index: int) -> dict[str, float]:
    """Return what torch reads through the vendor's package, where NVML cannot be loaded (ROCm)."""
    import torch

    try:
        return {
            "device/utilisation_percent": float(torch.cuda.utilization(index)),
            "device/power_watts": torch.cuda.power_draw(index) / 1000,
            "device/temperature_celsius": float(torch.cuda.temperature(index)),
        }
    except (ImportError, RuntimeError):
        return {}
