"""GPU counters by NVIDIA's management library, which the driver installs; no Python package is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any


class _Utilisation(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


_TEMPERATURE_OF_GPU, _CLOCK_OF_SM = 0, 1


class NvmlDevice:
    """Counters of one GPU. A counter that this GPU does not have is left out of `read`."""

    def __init__(self, uuid: str) -> None:
        self._library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        if self._library.nvmlInit_v2() != 0:
            raise OSError("NVML: nvmlInit_v2 failed; is the driver loaded?")
        name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        if self._library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(self._device)) != 0:
            raise OSError(f"NVML: no device {name}")
        self._first_energy = self._energy()

    def read(self) -> dict[str, float]:
        """Return utilisation, power, temperature, clock, memory, and the energy since construction."""
        found: dict[str, float | None] = {}
        busy, memory = _Utilisation(), _Memory()
        if self._ask("nvmlDeviceGetUtilizationRates", busy):
            found["device/utilisation_percent"] = float(busy.gpu)
            found["device/memory_utilisation_percent"] = float(busy.memory)
        if self._ask("nvmlDeviceGetMemoryInfo", memory):
            found["device/used_bytes"] = float(memory.used)
        found["device/power_watts"] = self._number("nvmlDeviceGetPowerUsage", scale=1e-3)
        found["device/temperature_celsius"] = self._number("nvmlDeviceGetTemperature", _TEMPERATURE_OF_GPU)
        found["device/clock_mhz"] = self._number("nvmlDeviceGetClockInfo", _CLOCK_OF_SM)
        energy = self._energy()
        if energy is not None and self._first_energy is not None:
            found["device/energy_joules"] = energy - self._first_energy
        return {name: value for name, value in found.items() if value is not None}

    def _energy(self) -> float | None:
        return self._number("nvmlDeviceGetTotalEnergyConsumption", kind=ctypes.c_ulonglong, scale=1e-3)

    def _number(
        self, function: str, *choice: int, kind: Callable[[], Any] = ctypes.c_uint, scale: float = 1.0
    ) -> float | None:
        value = kind()
        return float(value.value) * scale if self._ask(function, value, *choice) else None

    def _ask(self, function: str, target: Any, *choice: int) -> bool:
        call = getattr(self._library, function, None)
        arguments = (ctypes.c_int(one) for one in choice)
        return call is not None and call(self._device, *arguments, ctypes.byref(target)) == 0
