"""Name what holds an object: a variable, an attribute, a closure."""

from __future__ import annotations

import gc
import linecache
import re
import sys
from collections import deque
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any

_CONTAINERS = (list, dict, set, tuple, deque)
_ADDS = r"\s*(?:\.(?:append|extend|add|appendleft|insert|update|setdefault)\s*\(|\+=|\[[^]]*\]\s*=[^=])"
# Each search for referrers visits every object of the process.
_SEARCHES = 24
_MOST_REFERRERS = 50


def holder_of(thing: Any, frames: list[FrameType]) -> str:
    """Return a description of what keeps an object alive, "" if it is not found."""
    seen = {id(thing), id(frames)}
    waiting: deque[Any] = deque([thing])
    for _ in range(_SEARCHES):
        if not waiting:
            break
        current = waiting.popleft()
        if named := _variable(current, frames):
            return named
        referrers = [one for one in gc.get_referrers(current) if id(one) not in seen and one is not waiting]
        seen.update(map(id, referrers))
        for referrer in referrers[:_MOST_REFERRERS]:
            if isinstance(referrer, dict) and (named := _entry(referrer, current)):
                return named
            if isinstance(current, CellType) and isinstance(referrer, tuple):
                # The closure of a function.
                for function in gc.get_referrers(referrer):
                    if isinstance(function, FunctionType):
                        return function_label(function)
            if isinstance(referrer, FunctionType) and isinstance(current, tuple | CellType):
                return function_label(referrer)
            if isinstance(referrer, (*_CONTAINERS, CellType)):
                waiting.append(referrer)
            elif isinstance(referrer, FrameType | ModuleType | type | FunctionType):
                continue
            elif named := _attribute(referrer, current):
                return named
        del referrers
    return ""


def function_label(function: Any) -> str:
    """Return the name and the line of a function.

    >>> function_label(function_label).startswith("the function function_label at ")
    True
    """
    code = function.__code__
    return f"the function {function.__qualname__} at {code.co_filename}:{code.co_firstlineno}"


def callers() -> list[FrameType]:
    """Return the frames of the callers outside of this package, innermost first."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if ".observe.leaks" not in str(frame.f_globals.get("__name__", "")):
            found.append(frame)
        frame = frame.f_back
    return found


def _variable(thing: Any, frames: list[FrameType]) -> str:
    """Return the local variable of a caller that is this object."""
    for frame in frames:
        if frame.f_locals is not frame.f_globals:
            for name, value in list(frame.f_locals.items()):
                if value is thing:
                    return f"{type(thing).__name__} `{name}`" + _kept_at(frame.f_code.co_filename, name)
    return ""


def _entry(scope: dict[Any, Any], thing: Any) -> str:
    """Return the global variable or the attribute of an object whose dictionary this is."""
    module = sys.modules.get(str(scope.get("__name__", "")))
    if module is None or vars(module) is not scope:
        return ""
    name = next((str(key) for key, value in list(scope.items()) if value is thing), "")
    if not name:
        return ""
    return f"{type(thing).__name__} `{name}`" + _kept_at(str(getattr(module, "__file__", "")), name)


def _attribute(owner: Any, thing: Any) -> str:
    """Return the attribute of an object that is this thing."""
    members = getattr(owner, "__dict__", None)
    if not isinstance(members, dict):
        return ""
    name = next((str(key) for key, value in list(members.items()) if value is thing), "")
    if not name:
        return ""
    module = sys.modules.get(type(owner).__module__)
    return f"`{name}` of a {type(owner).__name__}" + _kept_at(str(getattr(module, "__file__", "")), name)


def _kept_at(file: str, name: str) -> str:
    """Return the lines of a file that add to a container of this name."""
    adds = re.compile(rf"\b{re.escape(name)}{_ADDS}")
    found = [number for number, text in enumerate(linecache.getlines(file), 1) if adds.search(text)]
    return f" (added to at {file}:{', '.join(map(str, found[:3]))})" if found else ""
