"""Memory that kernels of one device share between calls: partial sums and arrival counters."""

from __future__ import annotations

import torch
from torch import Tensor

_WORKSPACES: dict[torch.device, tuple[Tensor, Tensor]] = {}
_KEPT: list[Tensor] = []


def workspace(device: torch.device, floats: int, counters: int) -> tuple[Tensor, Tensor]:
    """Return fp32 partial sums and int32 counters, which are zero between calls.

    They are kept, outgrown ones too: captured CUDA graphs hold their addresses.
    """
    partial, counts = _WORKSPACES.get(device, (torch.empty(0), torch.empty(0)))
    if partial.numel() < floats or counts.numel() < counters:
        partial = torch.empty(max(floats, 1 << 20, partial.numel()), dtype=torch.float32, device=device)
        counts = torch.zeros(max(counters, 1 << 14, counts.numel()), dtype=torch.int32, device=device)
        _KEPT.extend((partial, counts))
        _WORKSPACES[device] = partial, counts
    return partial, counts
