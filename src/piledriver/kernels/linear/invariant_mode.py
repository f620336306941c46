"""A mode in which matrix products on a GPU are batch-invariant, whatever module calls them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from piledriver.kernels.registry import fastest_kernel

_HALF = (torch.bfloat16, torch.float16)


class InvariantProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces `mm` and `addmm` of 16-bit GPU matrices by the kernel of `linear`.

    A row of a product then has the same bits whatever the number of rows. Other operations of a transformer treat each
    row or element by itself already.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and _fits(args[0], args[1]):
            return _product(args[0], args[1], None)
        if func is torch.ops.aten.addmm.default and not kwargs and _fits(args[1], args[2]):
            bias, x, weight = args
            if bias.dim() == 1:
                return _product(x, weight, bias)
        return func(*args, **(kwargs or {}))


def _fits(x: Tensor, weight: Tensor) -> bool:
    return x.is_cuda and x.dtype in _HALF and weight.dtype == x.dtype


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    kernel: Any = fastest_kernel("linear", x.device)
    transposed = weight.t()
    if transposed.stride(1) != 1:
        transposed = transposed.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    out: Tensor = kernel(x, transposed, bias=bias, invariant=True)
    return out
