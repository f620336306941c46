"""Count the bytes of tensors that are alive at once while a block of code runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from piledriver.plan.placement.torch_private import TorchDispatchMode


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, `peak` grows to the most bytes of results of operators alive at once; views count once.

    >>> import torch
    >>> with LiveBytes() as count:
    ...     a = torch.zeros(256)
    ...     b = a.view(16, 16) + 1
    ...     del a
    ...     c = b + 1
    >>> count.peak, count.now
    (2048, 2048)
    """

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        """Count from zero; the memory of `ignored` tensors does not count."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet(tensor.untyped_storage() for tensor in ignored)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and count what it allocated."""
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage not in self._known:
                    self._known.add(storage)
                    size = storage.nbytes()
                    self.now += size
                    weakref.finalize(storage, self._free, size)
        self.peak = max(self.peak, self.now)
        return out

    def _free(self, size: int) -> None:
        self.now -= size
