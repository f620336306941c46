"""Gradient hooks that hold their owner weakly, so that a deleted model is freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


def when_accumulated(parameter: nn.Parameter, method: Callable[[nn.Parameter], None]) -> Any:
    """Call a bound method when a gradient was accumulated, while its object lives; return the hook's handle.

    torch stores hooks outside the reach of Python's garbage collector: a strong reference would leak the model.
    """
    held = weakref.WeakMethod(method)

    def call(arrived: nn.Parameter) -> None:
        there = held()
        if there is not None:
            there(arrived)

    return parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
