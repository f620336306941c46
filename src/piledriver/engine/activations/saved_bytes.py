"""Count the bytes that a part of a forward keeps alive, by tracking allocations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Untyped in torch.
_Mode: Any = TorchDispatchMode
_weak: Any = StorageWeakRef


class HeldBytes(_Mode):  # type: ignore[misc]
    """Counts the bytes allocated within the block that are still alive. Eager code only.

    >>> x = torch.ones(8, requires_grad=True)
    >>> with HeldBytes() as held:
    ...     y = x.exp()  # the backward of exp needs its output
    ...     z = y + 1  # that of + needs nothing
    >>> held.count(), held.count(leaving_out=[z])
    (64, 32)
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and record new storages."""
        given = {_storage(leaf)._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = _storage(leaf)
                # A view of an input is not new.
                if storage._cdata not in given and not self._is_alive(storage._cdata):
                    self.seen[storage._cdata] = (_weak(storage), storage.nbytes())
        return out

    def count(self, leaving_out: list[Tensor] | None = None) -> int:
        """Return the bytes alive now, without those of these tensors."""
        left_out = {_storage(tensor)._cdata for tensor in leaving_out or ()}
        return sum(size for key, (_, size) in self.seen.items() if self._is_alive(key) and key not in left_out)

    def _is_alive(self, key: int) -> bool:
        # An address may be reused after its storage is freed.
        return key in self.seen and not self.seen[key][0].expired()


def local_bytes(tensor: Tensor) -> int:
    """Return the bytes of the local shard."""
    part = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part.numel() * part.element_size()


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
