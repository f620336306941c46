"""Which devices does this process see: a value, so that every decision made from it can be tested without them."""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Counts of what torch can use here."""

    cuda: int = 0
    xpu: int = 0
    mps: int = 0
    xla: int = 0
    cores: int = 1
    cpu_only_reason: str = "no accelerator was found"

    def count(self, kind: str) -> int:
        """How many devices of a kind there are; the CPU is there once per process that wants it."""
        return {"cuda": self.cuda, "xpu": self.xpu, "mps": self.mps, "xla": self.xla}.get(kind, self.cores)

    def best(self) -> str:
        """The kind that training would choose by itself.

        >>> Hardware(cuda=8).best(), Hardware().best()
        ('cuda', 'cpu')
        """
        return next((kind for kind in ("cuda", "xpu", "xla", "mps") if self.count(kind)), "cpu")


def find_hardware() -> Hardware:
    """Look at this machine. Counting CUDA devices does not initialise CUDA, so a notebook may still fork afterwards."""
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
    """What to tell somebody who expected an accelerator."""
    import torch

    built_for = torch.version.cuda or torch.version.hip
    return f"torch was built for {built_for} but sees no device" if built_for else "this build of torch is for CPU only"


def usable_cores() -> int:
    """The cores that this process may run on, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _xla_count() -> int:
    # torch_xla takes the device at import, so it is only asked where it is installed and told which device to use.
    if "PJRT_DEVICE" not in os.environ or importlib.util.find_spec("torch_xla") is None:
        return 0
    try:
        runtime = importlib.import_module("torch_xla.runtime")
    except (ImportError, OSError):
        return 0
    return int(runtime.addressable_device_count())
