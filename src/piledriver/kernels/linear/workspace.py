# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc,name-defined"
"""Memory that kernels of one device share between calls: partial sums and arrival counters.

So two CUDA streams must not run such kernels at the same time.
"""

from __future__ import annotations

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

_WORKSPACES: dict[torch.device, tuple[Tensor, Tensor]] = {}
_KEPT: list[Tensor] = []

if triton is not None:

    @triton.jit
    def add_parts(first, size, parts):
        """Return the sum of `parts` tiles, in order: those at pointers `first`, and each `size` after the one before.

        They were written by other programs, so they are read from the second-level cache.
        """
        total = tl.load(first, cache_modifier=".cg")
        for part in range(1, parts):
            total += tl.load(first + part * size, cache_modifier=".cg")
        return total


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
