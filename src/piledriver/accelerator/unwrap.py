"""Unwrap a model. Preparing wraps nothing; other libraries do."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from piledriver.engine.precision import restore_forward


def unwrap_module(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Return the module inside DataParallel, DistributedDataParallel and torch.compile.

    With `keep_fp32_wrapper=False` its forward computes in its own precision again.
    """
    compiled = model if _looks_compiled(model) else None
    inner = compiled._orig_mod if compiled is not None else model
    while isinstance(inner, (DataParallel, DistributedDataParallel)):
        inner = inner.module
    if recursive:
        for name, child in list(inner.named_children()):
            setattr(inner, name, unwrap_module(child, keep_fp32_wrapper, keep_torch_compile, recursive=True))
    if not keep_fp32_wrapper and isinstance(inner, nn.Module):
        restore_forward(inner)
    if compiled is not None and keep_torch_compile:
        compiled._orig_mod = inner
        return compiled
    if not keep_torch_compile and _looks_compiled(inner):
        return inner._orig_mod
    return inner


def _looks_compiled(model: Any) -> bool:
    return isinstance(model, nn.Module) and "_orig_mod" in model._modules
