"""The tables of accelerators, links and hosts, and clusters made from them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from typing import Any

from piledriver.core.config import load_yaml
from piledriver.core.errors import UnknownNameError
from piledriver.plan.hardware.cluster import Cluster, Device, Host, Link

_GIB = 2**30


def make_cluster(name: str, count: int, /, **changes: Any) -> Cluster:
    """Return `count` devices of a kind with its usual links and host; `changes` override fields of the tables."""
    known = {**entry_of(name), **changes}
    return Cluster(
        device=make_device(name, known),
        count=count,
        node_size=max(1, min(int(known["node_size"]), count)),
        link=link_of(known["link"]),
        network=link_of(known["network"]),
        host=host_of(known["host"]),
    )


def device_names() -> list[str]:
    """Return the names of all accelerators."""
    return list(_tables()["accelerators"])


def make_device(name: str, known: Mapping[str, Any] | None = None) -> Device:
    """Return one accelerator of the table."""
    known = entry_of(name) if known is None else known
    return Device(
        name=known_name(name) if "name" not in known else str(known["name"]),
        memory=float(known["memory"]) * _GIB,
        bandwidth=float(known["bandwidth"]) * 1e12,
        peaks={dtype: float(rate) * 1e12 for dtype, rate in known["peaks"].items()},
        tile=int(known["tile"]),
        watts=float(known["watts"]),
        dollars=float(known["dollars"]),
        efficiency={key: float(share) for key, share in known["efficiency"].items()},
        kind="cpu" if name == "cpu" else "cuda",
        measured=known.get("measured", {}),
    )


def link_of(given: Any) -> Link:
    """Return a link by name, or from {gigabytes, microseconds}."""
    if isinstance(given, Mapping):
        known, name = given, str(given.get("name", "own"))
    else:
        table, name = _tables()["links"], str(given)
        if name not in table:
            raise UnknownNameError("link", name, table)
        known = table[name]
    return Link(
        name=name, bytes_per_second=float(known["gigabytes"]) * 1e9, latency=float(known["microseconds"]) * 1e-6
    )


def host_of(given: Any) -> Host:
    """Return a host by name, or from {memory, link, disk, adam}."""
    if isinstance(given, Mapping):
        known, name = {**_tables()["hosts"]["server"], **given}, "own"
    else:
        table, name = _tables()["hosts"], str(given)
        if name not in table:
            raise UnknownNameError("host", name, table)
        known = table[name]
    return Host(
        name=name,
        memory=float(known["memory"]) * _GIB,
        link=float(known["link"]) * 1e9,
        disk=float(known["disk"]) * 1e9,
        adam=float(known["adam"]) * 1e9,
    )


def name_of_driver(driver_name: str) -> str | None:
    """Return the table's name of a device by the name that its driver gives; None if it is unknown.

    >>> name_of_driver("NVIDIA H200"), name_of_driver("NVIDIA A100-SXM4-80GB")
    ('h200-141g', 'a100-80g')
    """
    found = [
        (len(part), name)
        for name, known in _tables()["accelerators"].items()
        for part in known.get("match", ())
        if part.lower() in driver_name.lower()
    ]
    return max(found)[1] if found else None


def known_name(name: str) -> str:
    """Return the table's name of a device, by its name or an alias; raises `UnknownNameError` with the nearest.

    >>> known_name("H100"), known_name("b200")
    ('h100-80g', 'b200-180g')
    """
    table, lower = _tables()["accelerators"], name.lower()
    if lower in table:
        return lower
    for known, entry in table.items():
        if lower in entry.get("aliases", ()):
            return str(known)
    raise UnknownNameError("accelerator", name, [*table, *(a for e in table.values() for a in e.get("aliases", ()))])


def entry_of(name: str) -> dict[str, Any]:
    """Return the figures of a device, with the defaults."""
    tables = _tables()
    defaults, entry = tables["defaults"], tables["accelerators"][known_name(name)]
    return {**defaults, **entry, "efficiency": {**defaults["efficiency"], **entry.get("efficiency", {})}}


@functools.cache
def _tables() -> dict[str, Any]:
    folder = resources.files("piledriver.plan.hardware")
    found: dict[str, Any] = {}
    for name in ("accelerators", "links", "hosts"):
        found |= load_yaml(folder.joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    return found
