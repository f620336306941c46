"""Watching gradients arrive, without keeping the watcher: a model that is gone takes its watchers along."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn


def when_accumulated(parameter: nn.Parameter, method: Callable[[nn.Parameter], None]) -> Any:
    """Call a bound method when the parameter has its gradient, as long as somebody else holds its object; a handle.

    torch keeps hooks where Python's collector does not look: one that held its model would keep it for ever.
    """
    held = weakref.WeakMethod(method)

    def call(arrived: nn.Parameter) -> None:
        there = held()
        if there is not None:
            there(arrived)

    return parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
