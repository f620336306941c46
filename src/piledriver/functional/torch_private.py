"""torch's private API that this room uses, so that a torch upgrade is one file."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_current_level,
)

__all__ = ["TransformType", "is_functorch_wrapped_tensor", "maybe_current_level"]


def has_dispatch_mode() -> bool:
    """Return whether a torch dispatch mode (a fake mode, a counter) surrounds this code."""
    return bool(torch._C._len_torch_dispatch_stack())


def is_batched(value: Tensor) -> bool:
    """Return whether a tensor is mapped over by a surrounding `vmap`."""
    while is_functorch_wrapped_tensor(value):
        if is_batchedtensor(value):
            return True
        value = get_unwrapped(value)
    return False


def functorch_transforms() -> list[TransformType]:
    """Return the kinds of the `torch.func` transforms around this code."""
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    return [interpreter.key() for interpreter in retrieve_all_functorch_interpreters()]


def fake_tensor_mode(leaves: list[Any] | None = None) -> Any:
    """Return the fake mode of these leaves, or a new one: tensors in it have shapes and no data."""
    from torch._guards import detect_fake_mode
    from torch._subclasses.fake_tensor import FakeTensorMode

    return (detect_fake_mode(leaves) if leaves else None) or FakeTensorMode(allow_non_fake_inputs=True)


def while_loop_operator(test: Any, body: Any, carry: tuple[Any, ...]) -> Any:
    """Run torch's higher-order loop."""
    from torch._higher_order_ops import while_loop

    return while_loop(test, body, carry)  # type: ignore[no-untyped-call]


def scan_operator(step: Any, carry: Any, xs: Any, reverse: bool) -> tuple[Any, Any]:
    """Run torch's higher-order scan."""
    from torch._higher_order_ops.scan import scan

    return scan(step, carry, xs, reverse=reverse)


def data_dependent_error() -> type[Exception]:
    """Return the error that a fake tensor raises when its data is asked for."""
    from torch._subclasses.fake_tensor import DataDependentOutputException

    return DataDependentOutputException


def shard_row_offset(tensor: Any) -> int:
    """Return the first row of the full tensor that the local shard of a DTensor holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offsets[0]


def is_fake(value: Tensor) -> bool:
    """Return whether a tensor has a shape and no data."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor)
