"""`is_dtensor`: ask for distributed tensors without importing `torch.distributed.tensor`, which takes over a second."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Return whether a tensor is a `DTensor`; where that module was never imported, there is none.

    >>> import torch
    >>> is_dtensor(torch.zeros(1))
    False
    """
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(tensor, kind)
