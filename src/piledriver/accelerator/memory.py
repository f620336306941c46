"""Free memory, and find the batch size that fits."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return cached device memory to the driver."""
    if garbage_collection:
        gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        torch.xpu.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def release_memory(*objects: Any) -> list[None]:
    """Free what only these objects hold; return as many None: `a, b = release_memory(a, b)`.

    >>> release_memory(object(), object())
    [None, None]
    """
    count = len(objects)
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


_OUT_OF_MEMORY = (
    "CUDA out of memory.",
    "XPU out of memory.",
    "MPS backend out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
    "out of memory",
)


def should_reduce_batch_size(error: Exception) -> bool:
    """Return whether an error is an out-of-memory error."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Call `function(batch_size, ...)` with smaller and smaller batch sizes until it does not run out of memory.

    >>> @find_executable_batch_size(starting_batch_size=16)
    ... def fits(batch_size):
    ...     if batch_size > 10:
    ...         raise RuntimeError("CUDA out of memory.")
    ...     return batch_size
    >>> fits()
    10
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    batch_size = starting_batch_size

    @functools.wraps(function)
    def attempt(*args: Any, **kwargs: Any) -> Any:
        nonlocal batch_size
        clear_device_cache(garbage_collection=True)
        parameters = list(inspect.signature(function).parameters)
        if len(parameters) < len(args) + 1:
            given = ", ".join(f"{name}={value!r}" for name, value in zip(parameters[1:], args[1:], strict=False))
            raise TypeError(
                f"Batch size was passed into `{function.__name__}` as the first argument when called. "
                f"Remove this as the decorator already does so: `{function.__name__}({given})`"
            )
        while True:
            if batch_size == 0:
                raise RuntimeError("No executable batch size found, reached zero.")
            try:
                return function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                clear_device_cache(garbage_collection=True)
                batch_size = reduce_batch_size_fn() if reduce_batch_size_fn is not None else int(batch_size * 0.9)

    return attempt
