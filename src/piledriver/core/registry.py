"""Registries of named objects, which other packages extend through entry points.

A room that can be extended owns one `Registry` (sources, filters, corpus stages, optimizers, kernels, model families,
presets, trackers). Built-in entries are `module:attribute` strings, so that listing them imports nothing, or come from
a data file. Another package adds its own under the entry-point group `piledriver.<kind>`; docs/core.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Generic, TypeVar, cast

from piledriver.core.errors import UnknownNameError, UsageError
from piledriver.core.object_reference import load_object

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of named objects, loaded on first use.

    `built_in` maps names to `module:attribute`; `read_table` returns things that are data, and is called on first use.

    >>> codecs = Registry("codec", {"base64": "base64:b64encode"})
    >>> codecs["base64"](b"hi")
    b'aGk='
    """

    def __init__(
        self,
        kind: str,
        built_in: Mapping[str, str] | None = None,
        *,
        read_table: Callable[[], Mapping[str, T]] | None = None,
    ) -> None:
        self.kind = kind
        self._targets: dict[str, str] = dict(built_in or {})
        self._loaded: dict[str, T] = {}
        self._read_table = read_table
        self._complete = False

    def register(self, name: str, thing: T) -> T:
        """Add a thing for this process and return it. Raises `UsageError` if the name is taken."""
        if name in self:
            raise UsageError(f"{self.kind} {name!r} is already registered", fix="choose another name")
        self._loaded[name] = thing
        return thing

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            if name not in self._targets:
                # Searching the installed packages takes a while: only for a name that is not built in.
                self._fill()
            if name in self._loaded:
                return self._loaded[name]
            if name not in self._targets:
                raise UnknownNameError(self.kind.replace("_", " "), name, self)
            self._loaded[name] = cast(T, load_object(self._targets[name]))
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        self._fill()
        return iter(sorted({*self._targets, *self._loaded}))

    def __contains__(self, name: object) -> bool:
        self._fill()
        return name in self._targets or name in self._loaded

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _fill(self) -> None:
        if self._complete:
            return
        self._complete = True
        for name, thing in (self._read_table() if self._read_table else {}).items():
            self._loaded.setdefault(name, thing)
        for entry in metadata.entry_points(group=f"piledriver.{self.kind}"):
            # Built-in names win: an installed package must not change what a known name means.
            if entry.name not in self._loaded:
                self._targets.setdefault(entry.name, entry.value)
