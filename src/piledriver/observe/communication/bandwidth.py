"""Algorithmic and bus bandwidth of collectives, with the factors of NCCL's own tests.

Algorithmic bandwidth is bytes over time; bus bandwidth is what each link carries, which can be compared with the
hardware's and does not depend on the number of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

_NAMES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_into_tensor": "all_gather",
    "allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "reducescatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "alltoallv": "all_to_all",
    "all_to_all_single": "all_to_all",
    "all_to_allv": "all_to_all",
    "recvanysource": "recv",
}
_SIZES = {
    "float": 4, "float32": 4, "float16": 2, "half": 2, "c10::half": 2, "bfloat16": 2, "c10::bfloat16": 2, "double": 8,
    "float64": 8, "long": 8, "long int": 8, "int64": 8, "int": 4, "int32": 4, "short": 2, "int16": 2, "byte": 1,
    "uint8": 1, "unsigned char": 1, "char": 1, "signed char": 1, "int8": 1, "bool": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}  # fmt: skip


def collective_name(name: str) -> str:
    """Return one spelling for the names that torch, NCCL and gloo use.

    >>> collective_name("nccl:_all_gather_base"), collective_name("gloo:allreduce"), collective_name("ALLREDUCE")
    ('all_gather', 'all_reduce', 'all_reduce')
    >>> collective_name("all_gather_single"), collective_name("reduce_scatter_single")
    ('all_gather', 'reduce_scatter')
    """
    short = name.lower().partition(":")[2].strip(":") or name.lower()
    if short.startswith(("nccldevkernel_", "ncclkernel_")):
        short = short.split("_")[1]
    short = short.removesuffix("_")
    compact = short.replace("_", "")
    for known, found in _NAMES.items():
        if short == known or compact == known.replace("_", ""):
            return found
    return short


def dtype_size(name: str) -> int:
    """Return the bytes of an element by the name of its type; 0 if unknown.

    >>> dtype_size("BFloat16"), dtype_size("c10::Half"), dtype_size("")
    (2, 2, 0)
    """
    return _SIZES.get(name.lower().removeprefix("torch."), 0)


def bus_factor(name: str, ranks: int) -> float:
    """Return bus bandwidth over algorithmic bandwidth.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    if ranks < 2:
        return 1.0
    if name == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if name in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


@dataclass(slots=True)
class Traffic:
    """All calls of one collective with one size in one group."""

    name: str
    group: str
    ranks: int
    size: int
    """Bytes of one call: of its larger side on one rank."""
    count: int
    seconds: float | None
    """Median duration of a call; None if durations are unknown."""
    skew_seconds: float | None = None
    """Median time between the first and the last rank's arrival; None with one rank's data."""

    @property
    def bytes(self) -> int:
        """Bytes of all calls."""
        return self.size * self.count

    @property
    def algorithm_bandwidth(self) -> float | None:
        """Bytes per second of one call."""
        return self.size / self.seconds if self.seconds else None

    @property
    def bus_bandwidth(self) -> float | None:
        """Bytes per second on each link."""
        rate = self.algorithm_bandwidth
        return None if rate is None else rate * bus_factor(self.name, self.ranks)


@dataclass(frozen=True, slots=True)
class TimedCall:
    """One collective as a recorder saw it; seconds are None where no duration is known."""

    name: str
    group: str
    ranks: int
    size: int
    seconds: float | None
    sequence: tuple[str, int] = ("", 0)
    """Group and number of the call, the same on all ranks of the group."""
    group_id: str = ""
    """Number of the group on this rank."""
    arrived_ns: int = 0
    """When this rank reached it, by the Unix clock."""


def summarise_traffic(calls: Iterable[TimedCall]) -> list[Traffic]:
    """Return the traffic by group, collective and size, most bytes first."""
    found: dict[tuple[str, str, int, int], list[float | None]] = defaultdict(list)
    for one in calls:
        found[one.group, one.name, one.ranks, one.size].append(one.seconds)
    rows = []
    for (group, name, ranks, size), seconds in found.items():
        known = sorted(one for one in seconds if one is not None)
        middle = known[len(known) // 2] if known else None
        rows.append(Traffic(name, group, ranks, size, len(seconds), middle))
    return sorted(rows, key=lambda row: -row.bytes)
