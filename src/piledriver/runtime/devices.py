"""Which device does this process compute on, and why."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from piledriver.runtime import environment
from piledriver.runtime.errors import MissingDeviceError
from piledriver.runtime.hardware import Hardware
from piledriver.runtime.launchers import Place


def choose_device(
    environ: Mapping[str, str], hardware: Hardware, place: Place, wish: str | torch.device | None
) -> tuple[torch.device, str]:
    """The caller's wish, then the environment's, then the best kind that is here; with the reason."""
    if wish is not None:
        return _of_kind(torch.device(wish), hardware, place), "asked for by the caller"
    found = environment.read(environment.DEVICE, environ)
    if found is not None:
        value, name = found
        return _of_kind(torch.device(value), hardware, place), f"{name}={value}"
    if environment.truth(environ.get("ACCELERATE_USE_CPU", ""), "ACCELERATE_USE_CPU"):
        return torch.device("cpu"), "ACCELERATE_USE_CPU is set"
    best = hardware.best()
    if best == "cpu":
        return torch.device("cpu"), hardware.cpu_only_reason
    if best == "mps" and place.size > 1:
        return torch.device("cpu"), "MPS has no backend to talk to other processes with"
    device = _of_kind(torch.device(best), hardware, place)
    return device, f"{hardware.count(best)} {best} device(s) here, one per local rank"


def _of_kind(device: torch.device, hardware: Hardware, place: Place) -> torch.device:
    """The device with its index, checked against what is there."""
    if device.type in ("cpu", "meta", "mps") or device.index is not None:
        return device
    count = hardware.count(device.type)
    if count == 0:
        raise MissingDeviceError(
            f"{device.type} was asked for but {hardware.cpu_only_reason}",
            fix=f"install a torch built for {device.type}, or ask for cpu",
        )
    if count == 1 and place.launcher in ("slurm", "openmpi", "mpich"):
        # Schedulers bind one device to each task and hide the others, so every task calls its own "0".
        return torch.device(device.type, 0)
    if place.local_rank >= count:
        raise MissingDeviceError(
            f"local rank {place.local_rank} has no {device.type} device: this node shows {count} "
            f"and {place.local_size} processes were started on it",
            fix=f"start {count} process(es) per node (--nproc {count}), or set {environment.DEVICE}=cpu",
        )
    return torch.device(device.type, place.local_rank)
