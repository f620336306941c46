"""What surrounds the code that is running: nested gradients, functorch transforms, a compiler.

Some operators have no rule for some transforms (fused attention has no second derivative, no forward mode); the layers
ask here which path to take.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch._C._functorch import TransformType, maybe_current_level

P = ParamSpec("P")
R = TypeVar("R")


class _Depth(threading.local):
    value = 0


_autograd = _Depth()


# A plain list, not a thread-local: the compiler traces through it (torch 2.11 through nothing else); it is back at 0
# when the trace ends.
_compiled_gradients = [0]


def gradient_depth() -> int:
    """How many of our `value_and_grad` are running in this thread on ordinary autograd."""
    return _autograd.value


@contextmanager
def one_more_gradient() -> Iterator[None]:
    """Count one for the duration of a block."""
    _autograd.value += 1
    try:
        yield
    finally:
        _autograd.value -= 1


def compiled_gradient_depth() -> int:
    """How many `value_and_grad` are being traced into the graph that is being compiled."""
    return _compiled_gradients[0]


def add_compiled_gradients(count: int) -> None:
    """Enter (+1) or leave (-1) a gradient inside a graph that is being compiled."""
    _compiled_gradients[0] += count


def inside_functorch() -> bool:
    """Whether a `torch.func` transform is running; only for eager code, which the compiler never sees."""
    return maybe_current_level() is not None


def fused_kernels_lack_a_rule(device: str) -> bool:
    """Whether what surrounds us has no rule for fused attention: forward mode, a second derivative, vmap on a CPU."""
    if torch.compiler.is_compiling():
        return compiled_gradient_depth() > 1
    grads, others = gradient_depth(), set()
    if maybe_current_level() is not None:
        from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

        for interpreter in retrieve_all_functorch_interpreters():
            if interpreter.key() == TransformType.Grad:
                grads += 1
            else:
                others.add(interpreter.key())
    return grads > 1 or TransformType.Jvp in others or (device == "cpu" and TransformType.Vmap in others)


def constant_when_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """A function of plain values whose result a compiled graph holds as a constant.

    What `torch.compiler.assume_constant_result` does, which would import the compiler now instead of when it is used.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function
