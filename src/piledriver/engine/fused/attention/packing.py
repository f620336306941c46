"""Calls without position ids have no packed documents: `transformers` need not ask the device in every forward pass.

It derives documents from position ids, also from those that a model counts up itself, and reads the result on the host.
That waits for all work of the step before; the GPU then idles until the first blocks are launched.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.engine.torch_private import remove_hooks, remove_pre_hooks

_NAME = "find_packed_sequence_indices"
_calls = threading.local()


def expect_packing_only_with_positions(model: nn.Module) -> bool:
    """Make the models of `transformers` within a model look for documents only in position ids that a call gives.

    Return whether this version of `transformers` can be told.
    """
    library: Any = sys.modules.get("transformers.masking_utils")
    find = getattr(library, _NAME, None)
    if find is None:
        return False
    if not hasattr(find, "original"):
        setattr(library, _NAME, _skipping(find))
    for module in _parts(model):
        module.register_forward_pre_hook(Enter(), with_kwargs=True)
        module.register_forward_hook(Leave(), always_call=True)
    return True


def forget_packing(model: nn.Module) -> None:
    """Remove the hooks."""
    for module in _parts(model):
        remove_pre_hooks(module, Enter)
        remove_hooks(module, Leave)


class Enter:
    """A hook that notes whether a call gives position ids."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        names = _positional(type(module).forward)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        _stack().append((id(module), given.get("position_ids") is None and len(args) <= len(names)))


class Leave:
    """A hook that forgets the call."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        stack = _stack()
        if stack and stack[-1][0] == id(module):
            stack.pop()


def _skipping(find: Any) -> Any:
    @functools.wraps(find)
    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        # A compiler reads nothing on the host.
        if not torch.compiler.is_compiling() and (stack := _stack()) and stack[-1][1]:
            return None
        found: Tensor | None = find(position_ids)
        return found

    find_packed_sequence_indices.original = find  # type: ignore[attr-defined]
    return find_packed_sequence_indices


def _stack() -> list[tuple[int, bool]]:
    """Return the calls that this thread is in: module, and whether position ids were left to it."""
    if not hasattr(_calls, "stack"):
        _calls.stack = []
    found: list[tuple[int, bool]] = _calls.stack
    return found


def _parts(model: nn.Module) -> list[nn.Module]:
    library: Any = sys.modules.get("transformers.modeling_utils")
    return [] if library is None else [one for one in model.modules() if isinstance(one, library.PreTrainedModel)]


@functools.cache
def _positional(forward: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a forward's positional arguments."""
    given = list(inspect.signature(forward).parameters.values())[1:]
    return tuple(one.name for one in given if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD)
