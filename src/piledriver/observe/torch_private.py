"""Every use of torch's private API in this room, so that an upgrade of torch is checked in one file."""

from torch.utils._pytree import tree_leaves

__all__ = ["tree_leaves"]
