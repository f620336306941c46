"""`Hardware`: the devices that this process sees, as a value, so that decisions can be tested without them."""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Counts of the devices that torch can use."""

    cuda: int = 0
    xpu: int = 0
    mps: int = 0
    xla: int = 0
    cores: int = 1
    cpu_only_reason: str = "no accelerator was found"

    def count(self, kind: str) -> int:
        """Return the number of devices of a kind; for the CPU, the number of cores."""
        return {"cuda": self.cuda, "xpu": self.xpu, "mps": self.mps, "xla": self.xla}.get(kind, self.cores)

    def best(self) -> str:
        """Return the kind of device that training chooses by default.

        >>> Hardware(cuda=8).best(), Hardware().best()
        ('cuda', 'cpu')
        """
        return next((kind for kind in ("cuda", "xpu", "xla", "mps") if self.count(kind)), "cpu")


def find_hardware() -> Hardware:
    """Return the hardware of this machine. Does not initialise CUDA, so that a notebook may still fork afterwards."""
    import torch

    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    xpu = torch.xpu.device_count() if hasattr(torch, "xpu") and torch.xpu.is_available() else 0
    return Hardware(
        cuda=cuda,
        xpu=xpu,
        mps=int(torch.backends.mps.is_available()),
        xla=_xla_count(),
        cores=usable_cores(),
        cpu_only_reason=why_cpu_only(),
    )


def why_cpu_only() -> str:
    """Return why torch has no accelerator here."""
    import torch

    built_for = torch.version.cuda or torch.version.hip
    return f"torch was built for {built_for} but sees no device" if built_for else "this build of torch is for CPU only"


def usable_cores() -> int:
    """Return the number of cores that this process may run on; in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _xla_count() -> int:
    # Importing torch_xla claims the device, so only do it if it is installed and configured.
    if "PJRT_DEVICE" not in os.environ or importlib.util.find_spec("torch_xla") is None:
        return 0
    try:
        runtime = importlib.import_module("torch_xla.runtime")
    except (ImportError, OSError):
        return 0
    return int(runtime.addressable_device_count())
