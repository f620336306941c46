"""torch's key-value stores, from the one place where torch gives them types."""

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

__all__ = ["FileStore", "PrefixStore", "Store", "TCPStore"]
