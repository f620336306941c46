"""Recompute cheap results in the backward pass of a compiled graph, where the compiler would store them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recompute_in_backward(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return function(*args); within a compiled graph its inputs are kept for the backward pass, not its result.

    The compiler stores what a matrix product reads in both passes, even where one gather or a formula makes it again.
    """
    if torch.is_grad_enabled() and torch.compiler.is_compiling():
        return cast(Tensor, checkpoint(function, *args, use_reentrant=False))
    return function(*args)
