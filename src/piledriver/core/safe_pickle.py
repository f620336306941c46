"""The one restricted unpickler: reads pickles of other programs without running what they name.

A pickle can name any function to call. `load_restricted_pickle` resolves names through a list that the caller gives,
and raises `ForbiddenNameError` for every other one; `load_inert` replaces all of them by objects that only keep
attributes. Values of the list are usually stand-ins that check their arguments, not the functions that the file names.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Collection, Mapping
from typing import IO, Any

DAMAGED_PICKLE = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    MemoryError,
    RecursionError,
    RuntimeError,
)
"""What reading a damaged or hostile pickle may raise."""


class ForbiddenNameError(pickle.UnpicklingError):
    """A pickle names a function or class that is not on the list of the reader."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it names {name}, which is not data")
        self.name = name


class InertObject:
    """An object of any class, reduced to its attributes."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update({str(key): value for key, value in state.items()})


def load_restricted_pickle(
    file: IO[bytes], allowed: Mapping[tuple[str, str], Any], *, enums: Collection[type[enum.Enum]] = ()
) -> Any:
    """Return the value in a pickle whose names are all keys (module, name) of `allowed`.

    `enums` are classes of the list whose members may be named: Python 3.11.0 to 3.11.3 pickle a member as
    `getattr(class, name)`. Raises one of `DAMAGED_PICKLE`.

    >>> import io
    >>> load_restricted_pickle(io.BytesIO(pickle.dumps({"a": {1, 2}})), {("builtins", "set"): set})
    {'a': {1, 2}}
    >>> load_restricted_pickle(io.BytesIO(pickle.dumps(print)), {})
    Traceback (most recent call last):
    piledriver.core.safe_pickle.ForbiddenNameError: it names builtins.print, which is not data
    """
    return _Unpickler(file, allowed, enums).load()


def load_inert(file: IO[bytes]) -> Any:
    """Return the value in a pickle with an `InertObject` for every object of a class, and for every call."""
    return _InertUnpickler(file).load()


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, file: IO[bytes], allowed: Mapping[tuple[str, str], Any], enums: Collection[type[enum.Enum]]
    ) -> None:
        super().__init__(file)
        self._allowed, self._enums = allowed, enums

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._allowed:
            return self._allowed[module, name]
        if (module, name) == ("builtins", "getattr") and self._enums:
            return self._enum_member
        raise ForbiddenNameError(f"{module}.{name}")

    def _enum_member(self, kind: Any, name: Any) -> enum.Enum:
        """Return a member of one of the enums: all that `builtins.getattr` may do in a pickle."""
        if not any(kind is one for one in self._enums) or name not in kind.__members__:
            raise ForbiddenNameError(f"builtins.getattr({kind!r}, {name!r})")
        member: enum.Enum = kind.__members__[name]
        return member


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return InertObject

    def persistent_load(self, pid: Any) -> Any:
        return InertObject()
