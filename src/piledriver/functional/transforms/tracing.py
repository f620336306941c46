"""Which transforms surround the running code: nested gradients, functorch transforms, a compiler.

Some operators have no rule for some transforms (fused attention has no second derivative, no forward mode); the layers
ask here which path to take.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, ParamSpec, TypeVar

import torch

from piledriver.functional.torch_private import TransformType, functorch_transforms, maybe_current_level

P = ParamSpec("P")
R = TypeVar("R")


class _Depth(threading.local):
    value = 0


_autograd = _Depth()


Transform = Literal["gradient", "batch", "tangent"]

# Lists of one number, not thread-locals: the compiler traces through them (torch 2.11 through nothing else); they are
# back at 0 when the trace ends.
_compiled: dict[str, list[int]] = {"gradient": [0], "batch": [0], "tangent": [0]}


def gradient_depth() -> int:
    """Return how many of our `value_and_grad` run in this thread on ordinary autograd."""
    return _autograd.value


@contextmanager
def one_more_gradient() -> Iterator[None]:
    """Count one for the duration of a block."""
    _autograd.value += 1
    try:
        yield
    finally:
        _autograd.value -= 1


def compiled_depth(kind: Transform) -> int:
    """Return how many of our transforms of a kind are being traced into the graph that is being compiled."""
    return _compiled[kind][0]


def counted(kind: Transform, transformed: Callable[P, R]) -> Callable[P, R]:
    """Wrap a transformed function to count itself while it is compiled: torch has no way to ask a compiler."""

    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return transformed(*args, **kwargs)
        _compiled[kind][0] += 1
        output = transformed(*args, **kwargs)
        _compiled[kind][0] -= 1
        return output

    return wrapped


def inside_functorch() -> bool:
    """Return whether a `torch.func` transform runs around this eager code."""
    return maybe_current_level() is not None


def fused_kernels_lack_a_rule(device: str) -> bool:
    """Return whether fused attention has no rule here: forward mode, a second derivative, vmap on a CPU."""
    if torch.compiler.is_compiling():
        gradients, batches, tangents = compiled_depth("gradient"), compiled_depth("batch"), compiled_depth("tangent")
    else:
        gradients, batches, tangents = _running()
    return gradients > 1 or tangents > 0 or (device == "cpu" and batches > 0)


def only_autograd_surrounds() -> bool:
    """Return whether no `torch.func` transform and no second derivative run: our own kernels have no rules for them."""
    if torch.compiler.is_compiling():
        return not (compiled_depth("gradient") or compiled_depth("batch") or compiled_depth("tangent"))
    return not inside_functorch() and gradient_depth() <= 1


def forward_mode_surrounds() -> bool:
    """Return whether a `jvp` runs around this eager code."""
    return inside_functorch() and _running()[2] > 0


def _running() -> tuple[int, int, int]:
    """Return the numbers of gradients, batches and tangents around eager code, ours and `torch.func`'s own."""
    kinds = functorch_transforms() if inside_functorch() else []
    wanted = (TransformType.Grad, TransformType.Vmap, TransformType.Jvp)
    gradients, batches, tangents = (kinds.count(kind) for kind in wanted)
    return gradient_depth() + gradients, batches, tangents
