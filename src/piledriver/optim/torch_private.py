"""torch's private API that this room uses, so that a torch upgrade is one file.

`torch._foreach_*`, which optimizers call directly, is documented by torch.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor


def supports_found_inf(optimizer: Any) -> bool:
    """Return whether a torch optimizer honours `found_inf` in its step; torch has no public flag for it."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def global_offsets(tensor: DTensor) -> list[int]:
    """Return the offsets of the local shard in the full tensor, by dimension; torch has no public function for it."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return list(offsets)
