"""Annotate a trace with the forwards of modules and with parts of the loop: loader, checkpoint, tracker, tokeniser.

Nothing is installed outside of a profile, so that a loop that is not profiled pays nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from piledriver.observe.torch_private import annotation, compiled_call
from piledriver.observe.trace.attribution import MODULE, REGION


class Instrumented(NamedTuple):
    """A function that a profile shows as a region: the object that holds it, its name there, the region's name."""

    owner: Any
    attribute: str
    region: str


# Where torch and common libraries save, tokenise and log; modules that are not imported are not searched.
_KNOWN = (
    ("torch", "save", "checkpoint"),
    ("torch.distributed.checkpoint", "save", "checkpoint"),
    ("torch.distributed.checkpoint", "async_save", "checkpoint"),
    ("safetensors.torch", "save_file", "checkpoint"),
    ("safetensors.torch", "save_model", "checkpoint"),
    ("transformers.PreTrainedTokenizerBase", "__call__", "tokeniser"),
    ("piledriver.observe.trackers.hub.TrackerHub", "log", "tracker"),
)


def region(name: str) -> Any:
    """Return a context that a profile counts under a name, such as `loader`, `checkpoint`, `tokeniser`, `tracker`.

    >>> with region("loader"):
    ...     batch = list(range(3))
    """
    return annotation(REGION + name)


@contextmanager
def annotated(models: Mapping[str, nn.Module], functions: Iterable[Instrumented] = ()) -> Iterator[None]:
    """Annotate the forwards of all modules, and known and given functions, within the block."""
    with ExitStack() as stack:
        for root, model in models.items():
            for path, module in annotatable(root, model):
                _annotate_module(stack, path, module)
        for one in (*_known_functions(), *functions):
            _annotate_function(stack, one)
        yield


def annotatable(root: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that can be seen one by one: what is inside a compiled module runs as one graph."""
    waiting: list[tuple[str, nn.Module]] = [(root, model)]
    seen: set[int] = set()
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield path, module
        if compiled_call(module) is None and not hasattr(module, "_orig_mod"):
            waiting.extend(reversed([(f"{path}.{name}", child) for name, child in module.named_children()]))


def _annotate_module(stack: ExitStack, path: str, module: nn.Module) -> None:
    if not callable(getattr(module, "forward", None)) or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return
    name = MODULE + path
    compiled = compiled_call(module)
    if compiled is not None:

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            with annotation(name):
                return compiled(*args, **kwargs)

        module._compiled_call_impl = call
        stack.callback(setattr, module, "_compiled_call_impl", compiled)
        return
    open_ones: list[Any] = []

    def enter(*_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        one = annotation(name)
        one.__enter__()
        open_ones.append(one)

    def leave(*_: Any) -> None:
        if not torch.compiler.is_compiling() and open_ones:
            open_ones.pop().__exit__(None, None, None)

    stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
    stack.callback(module.register_forward_hook(leave, always_call=True).remove)


def _known_functions() -> Iterator[Instrumented]:
    for path, attribute, name in _KNOWN:
        owner = sys.modules.get(path)
        if owner is None:
            module, _, inner = path.rpartition(".")
            owner = getattr(sys.modules.get(module), inner, None)
        if owner is not None and hasattr(owner, attribute):
            yield Instrumented(owner, attribute, name)


def _annotate_function(stack: ExitStack, one: Instrumented) -> None:
    original: Callable[..., Any] = getattr(one.owner, one.attribute)
    own = vars(one.owner).get(one.attribute)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with region(one.region):
            return original(*args, **kwargs)

    setattr(one.owner, one.attribute, call)
    # What the owner did not hold itself was inherited: taking the wrapper away restores it.
    restore = functools.partial(setattr, one.owner, one.attribute, own)
    stack.callback(restore if own is not None else functools.partial(delattr, one.owner, one.attribute))
