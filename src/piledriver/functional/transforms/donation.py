"""Donated memory: a step's new state is written into the tensors of the old one.

A result in the wrong place would be silently wrong, so everything that does not fit is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from piledriver.functional.errors import TransformError
from piledriver.functional.tree import leaves_of


def donated_leaves(args: tuple[Any, ...]) -> list[Any]:
    """Return the leaves of the first argument; one tensor in two places is an error."""
    if not args:
        raise TransformError("nothing to donate: no argument by position", fix="pass the state first, unnamed")
    leaves = leaves_of(args[0])
    tensors = [id(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    if len(set(tensors)) < len(tensors):
        raise TransformError(
            "the donated state holds one tensor in two places", fix="give each its own: `tree_map(torch.clone, params)`"
        )
    return leaves


def donating(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to copy its first result into `old` and return the others (None if there are no others)."""

    @functools.wraps(function)
    def wrapped(old: list[Any], *args: Any, **kwargs: Any) -> tuple[Any, ...] | None:
        output = function(*args, **kwargs)
        made, rest = (output[0], output[1:]) if type(output) is tuple else (output, None)
        new = leaves_of(made)
        if len(old) != len(new):
            raise TransformError(f"donated {len(old)} leaves for {len(new)}", fix="return the new state first")
        held = {mine for mine in old if isinstance(mine, Tensor)}
        # What only changed its place (a target network) is copied before anything is overwritten.
        new = [
            one.clone() if isinstance(one, Tensor) and one is not mine and one in held else one
            for mine, one in zip(old, new, strict=True)
        ]
        with torch.no_grad():
            for mine, fresh in zip(old, new, strict=True):
                _check_fit(mine, fresh)
                if isinstance(mine, Tensor) and mine is not fresh:
                    mine.copy_(fresh)
        return rest

    return wrapped


def _check_fit(mine: Any, fresh: Any) -> None:
    if not isinstance(mine, Tensor):
        if isinstance(fresh, Tensor) or mine != fresh:
            raise TransformError(
                f"{mine!r} in the donated state is to become {fresh!r}", fix="hold what changes in a tensor"
            )
    elif not isinstance(fresh, Tensor) or mine.shape != fresh.shape or mine.dtype != fresh.dtype:
        raise TransformError(
            f"a donated tensor of {tuple(mine.shape)}, {mine.dtype} is to become {_described(fresh)}",
            fix="return a state of the same structure, shapes and dtypes first",
        )


def _described(value: Any) -> str:
    return f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
