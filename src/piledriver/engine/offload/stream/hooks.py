"""Hooks that call a stream before and after a module's forward.

They are torch's own hooks and run outside a block's compiled forward, which stays one graph.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import nn


class CalledStream(Protocol):
    """What the hooks call: a stream with a number for each module."""

    def before(self, number: int, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """Bring the weights of a module; return other arguments for its forward, or None."""

    def after(self, number: int, out: Any) -> None:
        """Take the weights of a module out; `out` is None if its forward raised."""


def attach_stream(module: nn.Module, stream: CalledStream, number: int) -> None:
    """Call the stream around the module's forward, outside all other hooks."""
    module.register_forward_pre_hook(_Before(stream, number), prepend=True, with_kwargs=True)
    module.register_forward_hook(_After(stream, number), always_call=True)


def detach_stream(module: nn.Module, stream: CalledStream) -> None:
    """Remove the hooks of a stream from a module."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, _Hook) and hook.stream is stream:
                del hooks[key]
                for marks in (
                    module._forward_pre_hooks_with_kwargs,
                    module._forward_hooks_with_kwargs,
                    module._forward_hooks_always_called,
                ):
                    marks.pop(key, None)


class _Hook:
    def __init__(self, stream: CalledStream, number: int) -> None:
        self.stream, self.number = stream, number

    def _outside_compiler(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call without compiling the callee: a compiled caller breaks its graph here, the block's stays whole."""
        compiler = sys.modules.get("torch._dynamo")  # importing it takes seconds
        return call(*args) if compiler is None else compiler.disable(call)(*args)


class _Before(_Hook):
    def __call__(self, _module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        return self._outside_compiler(self.stream.before, self.number, args, kwargs)


class _After(_Hook):
    def __call__(self, _module: nn.Module, _args: Any, out: Any) -> None:
        self._outside_compiler(self.stream.after, self.number, out)


for _hook in (_Before, _After):
    _hook.__call__._torchdynamo_disable = True  # type: ignore[union-attr]
