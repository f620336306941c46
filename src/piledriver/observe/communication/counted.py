"""Count the collectives of a step and their bytes, by torch's `CommDebugMode`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.tensor.debug import CommDebugMode

from piledriver.observe.communication.sizes import collective_bytes


@dataclass
class Communication:
    """Calls and bytes by collective; the bytes of a call are those of its larger side on this rank."""

    calls: dict[str, int] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        from piledriver.observe.memory import readable

        if not self.calls:
            return "no communication"
        return ", ".join(
            f"{name} x{count} ({readable(self.bytes[name])})" for name, count in sorted(self.calls.items())
        )


@contextmanager
def counted_communication() -> Iterator[Communication]:
    """Count the collectives of a block. Counting slows it down: use it for single steps.

    >>> import torch
    >>> with counted_communication() as found:
    ...     _ = torch.ones(2) + 1
    >>> print(found)
    no communication
    """
    found = Communication()
    mode = _Traffic()
    with mode:
        yield found
    found.calls = {_name(packet): count for packet, count in mode.get_comm_counts().items()}
    found.bytes = dict(mode.traffic)


class _Traffic(CommDebugMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traffic: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = dict(self.comm_counts)
        result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        for packet, count in self.comm_counts.items():
            if count > before.get(packet, 0):
                self.traffic[_name(packet)] += max(collective_bytes((args, kwargs)), collective_bytes(result))
        return result


def _name(packet: Any) -> str:
    return str(getattr(packet, "__name__", packet)).rsplit(".", 1)[-1].strip("_")
