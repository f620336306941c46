"""Caches of costs by model: the model is told by its identity, whose hash costs nothing, the rest by its value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from piledriver.models.config import ModelConfig

F = TypeVar("F", bound=Callable[..., Any])
_MODELS = 8
_MISSING = object()


def cached_per_model(function: F) -> F:
    """Return a function of (model config, ...) that computes each answer once, for the last few configs.

    A search asks for the costs of one model tens of thousands of times.
    """
    answers_of = answers_by_model()

    @functools.wraps(function)
    def answer(config: ModelConfig, *given: Any, **named: Any) -> Any:
        answers = answers_of(config)
        key = (given, tuple(named.items())) if named else given
        found = answers.get(key, _MISSING)
        if found is _MISSING:
            found = answers[key] = function(config, *given, **named)
        return found

    return cast(F, answer)


def answers_by_model() -> Callable[[ModelConfig], dict[Any, Any]]:
    """Return a function that returns the cache of a model config: one of the last few."""
    known: dict[int, tuple[ModelConfig, dict[Any, Any]]] = {}

    def answers_of(config: ModelConfig) -> dict[Any, Any]:
        entry = known.get(id(config))
        if entry is None:
            if len(known) >= _MODELS:
                del known[next(iter(known))]
            # The entry holds the config, so that its identity is not taken by another.
            entry = known[id(config)] = (config, {})
        return entry[1]

    return answers_of
