"""Remove empty key-value caches, which Hugging Face models pass to their blocks even in training.

A recomputed block would append to the cache twice, and a compiled one would recompile for every layer index.
"""

from __future__ import annotations

from typing import Any

from piledriver.engine.errors import EngineError


def without_empty_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with None in place of empty caches."""
    if not any(is_cache(one) for one in (*args, *kwargs.values())):
        return args, kwargs
    return (
        tuple(None if _is_empty(one) else one for one in args),
        {name: None if _is_empty(one) else one for name, one in kwargs.items()},
    )


def refuse_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Reject caches with content, which a recomputed block would append to twice."""
    if any(is_cache(one) for one in (*args, *kwargs.values())):
        raise EngineError(
            "a recomputed block was given a key-value cache with content, to which it would append twice",
            fix="train with use_cache=False and no past_key_values; generate under torch.no_grad()",
        )


def is_cache(given: Any) -> bool:
    """Whether this is a Hugging Face key-value cache."""
    return hasattr(given, "get_seq_length") and hasattr(given, "update")


def _is_empty(given: Any) -> bool:
    return is_cache(given) and int(given.get_seq_length()) == 0
