"""Hugging Face models give their blocks a cache of keys and values in training too, and throw it away afterwards.

A block that is computed again would add to it twice, and a compiled one would be compiled anew for every layer that it
counts: in training they get none.
"""

from __future__ import annotations

from typing import Any

from piledriver.engine.errors import EngineError


def without_empty_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with None for a cache that holds nothing; one that holds something stays."""
    if not any(is_cache(one) for one in (*args, *kwargs.values())):
        return args, kwargs
    return (
        tuple(None if _is_empty(one) else one for one in args),
        {name: None if _is_empty(one) else one for name, one in kwargs.items()},
    )


def refuse_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A cache that holds something cannot be given to a block that will be computed again."""
    if any(is_cache(one) for one in (*args, *kwargs.values())):
        raise EngineError(
            "a block that is recomputed was given a cache that holds keys and values: it would add to it twice",
            fix="use activations='keep'",
        )


def is_cache(given: Any) -> bool:
    """Whether this is a cache as Hugging Face's blocks take it."""
    return hasattr(given, "get_seq_length") and hasattr(given, "update")


def _is_empty(given: Any) -> bool:
    return is_cache(given) and int(given.get_seq_length()) == 0
