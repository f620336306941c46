"""Intercept the collectives that Python starts, only while a listener wants them.

The methods of `ProcessGroup` are replaced while there are listeners and put back after the last one has left, so that
collectives in between cost nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist

from piledriver.observe.communication.bandwidth import collective_name
from piledriver.observe.communication.sizes import collective_bytes

_METHODS = (
    "allreduce", "allgather", "_allgather_base", "all_gather_single", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single", "broadcast", "alltoall", "alltoall_base", "all_to_all_single", "reduce", "gather",
    "scatter", "send", "recv", "barrier",
)  # fmt: skip
_IN_PLACE = frozenset({"allreduce", "broadcast", "reduce"})
_lock = threading.Lock()
_originals: dict[str, Any] = {}
_listeners: tuple[Listener, ...] = ()


class Listener(Protocol):
    """Is told of collectives."""

    def hear(self, name: str, group: Any, size: int, begin_ns: int, work: Any, args: tuple[Any, ...]) -> None:
        """Take note of a collective that was started at a time of the Unix clock."""
        ...


def listen(listener: Listener) -> None:
    """Tell a listener of every collective that Python starts from now on."""
    global _listeners
    if not dist.is_available():
        return
    with _lock:
        if not _listeners:
            for name in _METHODS:
                if name in vars(dist.ProcessGroup):
                    # As the class holds it: what getattr returns would not bind to a group when it is put back.
                    _originals[name] = vars(dist.ProcessGroup)[name]
                    setattr(dist.ProcessGroup, name, _intercepted(name, getattr(dist.ProcessGroup, name)))
        if listener not in _listeners:
            _listeners = (*_listeners, listener)


def ignore(listener: Listener) -> None:
    """Tell a listener of no further collective."""
    global _listeners
    with _lock:
        _listeners = tuple(one for one in _listeners if one is not listener)
        if not _listeners:
            for name, original in _originals.items():
                setattr(dist.ProcessGroup, name, original)
            _originals.clear()


def _intercepted(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    name, in_place, now = collective_name(method), method in _IN_PLACE, time.time_ns

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        begin_ns = now()
        work = original(group, *args, **kwargs)
        first: Any = args[0] if args else None
        # Most calls are of one tensor, and searching through the arguments would cost more than the rest.
        single = in_place and type(first) is list and len(first) == 1
        size = first[0].nbytes if single else collective_bytes(args)
        for listener in _listeners:
            listener.hear(name, group, size, begin_ns, work, args)
        return work

    return call
