"""`Tier`: where a weight waits between its uses, from fast and small to slow and large."""

from __future__ import annotations

import enum
from typing import Any

import torch


class Tier(enum.StrEnum):
    """The memory that holds a weight while its block does not compute."""

    DEVICE = "device"
    """The memory of the device that computes: the weight never moves."""
    HOST = "host"
    """Host memory, pinned if the device is a GPU."""
    DISK = "disk"
    """A file, read with direct I/O."""


def tier_of(place: Any, execution_device: Any) -> Tier:
    """Return the tier of a place in a device map ("cpu", "disk", a device) for a module that runs on a device.

    >>> tier_of("cpu", "cuda:0"), tier_of("cpu", "cpu"), tier_of("disk", "cpu")
    (<Tier.HOST: 'host'>, <Tier.DEVICE: 'device'>, <Tier.DISK: 'disk'>)
    """
    if place == "disk":
        return Tier.DISK
    if place == "cpu" and torch.device(execution_device).type != "cpu":
        return Tier.HOST
    return Tier.DEVICE
