"""Errors with one line that names the value, the place and the fix; one class per cause.

`exit_code` is what the command line returns: 2 for wrong usage (a command, key or name that is not valid), 1 for any
other error. Errors are raised before anything is allocated or overwritten.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PiledriverError(Exception):
    """Base of all errors of this package.

    >>> str(PiledriverError("shard 00003 is truncated", fix="build it again"))
    'shard 00003 is truncated. Fix: build it again'
    """

    exit_code = 1

    def __init__(self, what: str, *, fix: str | None = None) -> None:
        self.what = what
        self.fix = fix
        super().__init__(what if fix is None else f"{what.rstrip('.')}. Fix: {fix}")

    def __reduce__(self) -> tuple[object, ...]:
        # Errors are pickled between processes; the default reduce would lose the keyword argument.
        return _rebuild, (type(self), self.what, self.fix)


def _rebuild(cls: type[PiledriverError], what: str, fix: str | None) -> PiledriverError:
    error = cls.__new__(cls)
    PiledriverError.__init__(error, what, fix=fix)
    return error


class UsageError(PiledriverError):
    """A command or call is not valid as written; nothing was done."""

    exit_code = 2


class ConfigError(UsageError):
    """A config file or override has an unknown key, or a value of the wrong type or range.

    The message names the file with its line (or the command line), the key and the fix.
    """


class UnknownNameError(UsageError):
    """A name that is not registered, such as a source, filter, tracker or preset."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}", fix=suggest(name, known))


class StorageError(PiledriverError):
    """A file could not be read or written. A failed write leaves the previous file."""


class MissingFileError(StorageError):
    """A file or folder that was named does not exist."""

    def __init__(self, location: object, *, fix: str = "check the path") -> None:
        super().__init__(f"{location} does not exist", fix=fix)


class CorruptFileError(StorageError):
    """A file exists but is truncated, damaged, or of another format."""


class MissingDependencyError(PiledriverError):
    """A feature needs an optional package.

    >>> str(MissingDependencyError("ray", extra="ray", purpose="the ray executor"))
    "the ray executor needs the package 'ray'. Fix: pip install 'piledriver[ray]'"
    """

    def __init__(self, package: str, *, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package {package!r}", fix=f"pip install 'piledriver[{extra}]'")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the closest known name, or None if none is close."""
    matches = difflib.get_close_matches(name.lower(), {k.lower(): k for k in known}, n=1, cutoff=0.5)
    return next((k for k in known if k.lower() == matches[0]), None) if matches else None


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the fix for an unknown name: the closest one, or the list of known names."""
    known = sorted(known)
    close = nearest(name, known)
    if close is not None:
        return f"did you mean {close!r}?"
    return f"choose from {', '.join(known)}" if known else "no name is registered"
