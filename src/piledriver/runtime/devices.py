"""Choose the device of a process, with the reason."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from piledriver.runtime import environment
from piledriver.runtime.detect_launcher import RankInfo
from piledriver.runtime.errors import MissingDeviceError
from piledriver.runtime.hardware import Hardware


def choose_device(
    environ: Mapping[str, str], hardware: Hardware, found: RankInfo, wish: str | torch.device | None
) -> tuple[torch.device, str]:
    """Return the device and the reason: the caller's choice, the environment's, or the best kind that is present."""
    if wish is not None:
        return _of_kind(torch.device(wish), hardware, found), "given by the caller"
    variable = environment.lookup(environment.DEVICE, environ)
    if variable is not None:
        value, name = variable
        return _of_kind(torch.device(value), hardware, found), f"{name}={value}"
    if environment.parse_bool(environ.get("ACCELERATE_USE_CPU", ""), "ACCELERATE_USE_CPU"):
        return torch.device("cpu"), "ACCELERATE_USE_CPU is set"
    best = hardware.best()
    if best == "cpu":
        return torch.device("cpu"), hardware.cpu_only_reason
    if best == "mps" and found.size > 1:
        return torch.device("cpu"), "MPS has no distributed backend"
    device = _of_kind(torch.device(best), hardware, found)
    return device, f"{hardware.count(best)} {best} device(s), one per local rank"


def _of_kind(device: torch.device, hardware: Hardware, found: RankInfo) -> torch.device:
    """Return the device with its index; raises `MissingDeviceError` if it is not present."""
    if device.type in ("cpu", "meta", "mps") or device.index is not None:
        return device
    count = hardware.count(device.type)
    if count == 0:
        raise MissingDeviceError(
            f"device {device.type} was requested, but {hardware.cpu_only_reason}",
            fix=f"install a torch built for {device.type}, or use cpu",
        )
    if count == 1 and found.launcher in ("slurm", "openmpi", "mpich"):
        # Schedulers bind one device to each task and hide the others, so that every task sees its own as 0.
        return torch.device(device.type, 0)
    if found.local_rank >= count:
        raise MissingDeviceError(
            f"local rank {found.local_rank} has no {device.type} device: this node has {count}, "
            f"and {found.local_size} processes were started on it",
            fix=f"start {count} process(es) per node (--nproc {count}), or set {environment.DEVICE}=cpu",
        )
    return torch.device(device.type, found.local_rank)
