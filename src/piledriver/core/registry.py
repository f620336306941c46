"""Names to things, open to other packages.

A room that can be extended (sources, filters, trackers, layouts) owns one `Registry`. Our own entries are given as
`module:attribute` strings, so that listing them imports nothing; other packages add theirs through the entry-point
group `piledriver.<kind>`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Generic, TypeVar, cast

from piledriver.core.errors import UnknownNameError, UsageError

T = TypeVar("T")


class Registry(Generic[T]):
    """A lazily imported table of named things.

    >>> codecs = Registry("codec", {"base64": "base64:b64encode"})
    >>> codecs["base64"](b"hi")
    b'aGk='
    """

    def __init__(self, kind: str, built_in: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._targets: dict[str, str] = dict(built_in or {})
        self._loaded: dict[str, T] = {}
        self._entry_points_read = False

    def register(self, name: str, thing: T) -> T:
        """Add one thing by hand, for this process. A name is never silently replaced."""
        if name in self:
            raise UsageError(f"{self.kind} {name!r} is registered already", fix="choose another name")
        self._loaded[name] = thing
        return thing

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            self._read_entry_points()
            if name not in self._targets:
                raise UnknownNameError(self.kind, name, self)
            module, _, attribute = self._targets[name].partition(":")
            self._loaded[name] = cast(T, getattr(importlib.import_module(module), attribute))
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        self._read_entry_points()
        return iter(sorted({*self._targets, *self._loaded}))

    def __contains__(self, name: object) -> bool:
        self._read_entry_points()
        return name in self._targets or name in self._loaded

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _read_entry_points(self) -> None:
        if self._entry_points_read:
            return
        self._entry_points_read = True
        for entry in metadata.entry_points(group=f"piledriver.{self.kind}"):
            # Ours win: a package that is installed by accident must not change what a known name means.
            self._targets.setdefault(entry.name, entry.value)
