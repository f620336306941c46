"""How much memory this process holds, on the device and on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes, now and at the highest point since the last `reset_peak`."""

    device_allocated: int
    """Held by tensors on the device; 0 where there is no accelerator."""
    device_reserved: int
    """Held by torch's allocator for them."""
    device_peak: int
    """The highest `device_allocated`."""
    device_total: int
    host_rss: int
    """Of this process, as the operating system counts it."""
    host_available: int
    """What the machine could still give."""


def memory_use(device: torch.device | str | None = None) -> MemoryUse:
    """Look now. Costs microseconds; does not wait for the device."""
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


def reset_peak(device: torch.device | str | None = None) -> None:
    """Start looking for the highest point again."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats(device)


def readable(size: float) -> str:
    """Bytes for people.

    >>> readable(1536), readable(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
