"""What a load did: which keys fitted, which did not, and what else was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from piledriver.checkpoint.errors import StateMismatchError

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """The outcome of a load, key by key.

    >>> print(LoadReport(matched=("fc.weight",), missing=("fc.bias",)))
    1 matched, 1 missing (fc.bias)
    """

    matched: tuple[str, ...] = ()
    """Keys that were loaded."""
    missing: tuple[str, ...] = ()
    """Keys that the objects have and the checkpoint has not; they keep their values."""
    unexpected: tuple[str, ...] = ()
    """Keys that the checkpoint has and the objects have not."""
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Keys whose shape differs: (saved, wanted). Not loaded."""
    notes: tuple[str, ...] = ()
    """What else a user should know, such as a generator that was saved by fewer ranks."""
    step: int | None = None
    layout: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether everything fitted."""
        return not (self.missing or self.unexpected or self.reshaped)

    def raise_unless_exact(self) -> None:
        """A strict load's check: one line that names the first keys that do not fit."""
        if not self.exact:
            raise StateMismatchError(
                f"the checkpoint does not fit: {self}", fix="load with strict=False, or rename keys with key_map"
            )

    def __str__(self) -> str:
        parts = [f"{len(self.matched)} matched"]
        for name in ("missing", "unexpected"):
            keys = getattr(self, name)
            if keys:
                parts.append(f"{len(keys)} {name} ({_some(list(keys))})")
        if self.reshaped:
            shapes = [f"{key} {list(old)} -> {list(new)}" for key, (old, new) in self.reshaped.items()]
            parts.append(f"{len(self.reshaped)} reshaped ({_some(shapes)})")
        return ", ".join([*parts, *self.notes])


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
