"""Report of a load: which keys matched and which did not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from piledriver.checkpoint.errors import StateMismatchError

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Outcome of a load, key by key.

    >>> print(LoadReport(matched=("fc.weight",), missing=("fc.bias",)))
    1 matched, 1 missing (fc.bias)
    """

    matched: tuple[str, ...] = ()
    """Keys that were loaded."""
    missing: tuple[str, ...] = ()
    """Keys of the objects that the checkpoint lacks; their values are unchanged."""
    unexpected: tuple[str, ...] = ()
    """Keys of the checkpoint that the objects lack."""
    reshaped: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Keys with another shape, not loaded: (saved, wanted)."""
    notes: tuple[str, ...] = ()
    """Further remarks, such as random states that were saved by fewer ranks."""
    step: int | None = None
    layout: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Return whether all keys and shapes matched."""
        return not (self.missing or self.unexpected or self.reshaped)

    def raise_unless_exact(self) -> None:
        """Raise `StateMismatchError`, naming the first keys that differ, unless all matched."""
        if not self.exact:
            raise StateMismatchError(
                f"checkpoint and objects differ: {self}", fix="load with strict=False, or rename keys with key_map"
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
