"""Memory use of this process, on the device and on the host."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use, and their peak since the last `reset_peak`."""

    device_allocated: int
    """Allocated by tensors on the device; 0 without an accelerator."""
    device_reserved: int
    """Reserved by torch's caching allocator."""
    device_peak: int
    """Peak of `device_allocated`."""
    device_total: int
    host_rss: int
    """Resident set size of this process."""
    host_available: int
    """Available memory of the machine."""


def memory_use(device: torch.device | str | None = None) -> MemoryUse:
    """Return the memory in use now, without a device synchronisation."""
    import psutil

    allocated = reserved = peak = total = 0
    chosen = (
        torch.device(device) if device is not None else torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )
    if chosen.type == "cuda":
        allocated = torch.cuda.memory_allocated(chosen)
        reserved = torch.cuda.memory_reserved(chosen)
        peak = torch.cuda.max_memory_allocated(chosen)
        total = torch.cuda.get_device_properties(chosen).total_memory
    return MemoryUse(
        allocated, reserved, peak, total, psutil.Process().memory_info().rss, psutil.virtual_memory().available
    )


def step_memory(device: torch.device) -> int:
    """Return the peak of tensors on a GPU, or of this process's resident bytes; cheap enough for every step."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        with open("/proc/self/status", "rb", buffering=0) as file:
            _, _, found = file.read(8192).partition(b"VmHWM:")
        return int(found.split(None, 1)[0]) * 1024
    except (OSError, IndexError, ValueError):  # not Linux
        return memory_use(device).host_rss


def reset_host_peak() -> int:
    """Begin the peak of this process's resident bytes again, where the system allows it; return the bytes now."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return memory_use("cpu").host_rss


def reset_peak(device: torch.device | str | None = None) -> None:
    """Reset the peak of the device."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats(device)


def readable(size: float) -> str:
    """Return a number of bytes with a binary unit.

    >>> readable(1536), readable(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
