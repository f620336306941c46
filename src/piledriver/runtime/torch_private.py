"""torch's private API that this room uses, so that a torch upgrade is one file."""

from __future__ import annotations

import torch.distributed as dist

# `torch.distributed` exports these too, but without types.
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

__all__ = ["FileStore", "PrefixStore", "Store", "TCPStore", "default_store"]


def default_store() -> Store:
    """Return the key-value store of the default process group; torch has no public way to it."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store
