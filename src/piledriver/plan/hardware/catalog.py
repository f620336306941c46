"""Parse hardware: names such as `64xh100-80g`, YAML files, or `here`."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml

from piledriver.core.errors import UnknownNameError
from piledriver.plan.errors import PlanError
from piledriver.plan.hardware.cluster import Cluster, Device, Host, Link

_GIB = 2**30
_NAME = re.compile(r"(?:(\d+)\s*x\s*)?([a-z0-9][a-z0-9.\-_]*)", re.IGNORECASE)


def parse_hardware(text: str) -> Cluster:
    """Return the cluster that a name, a file or `here` describes.

    >>> cluster = parse_hardware("16xh100-80g")
    >>> cluster.count, cluster.node_size, cluster.link.name
    (16, 8, 'nvlink4')
    >>> parse_hardware("8xh10-80g")
    Traceback (most recent call last):
    piledriver.core.errors.UnknownNameError: unknown accelerator 'h10-80g'. Fix: did you mean 'h100-80g'?
    """
    if text == "here":
        from piledriver.plan.hardware.here import detect_cluster

        return detect_cluster()
    if text.endswith((".yaml", ".yml")) or os.path.sep in text:
        return _read_file(text)
    parts = [_parse_part(part, text) for part in text.split("+")]
    count, name = parts[0]
    cluster = make_cluster(name, count)
    if len(parts) == 1:
        return cluster
    others = tuple((more, device_of(kind)) for more, kind in parts[1:])
    return Cluster(
        device=cluster.device,
        count=sum(more for more, _ in parts),
        node_size=cluster.node_size,
        link=cluster.link,
        network=cluster.network,
        host=cluster.host,
        others=others,
    )


def make_cluster(name: str, count: int, **changes: Any) -> Cluster:
    """Return `count` devices of a kind with its usual links and host; `changes` override fields of the tables."""
    known = {**_entry(name), **changes}
    return Cluster(
        device=device_of(name, known),
        count=count,
        node_size=max(1, min(int(known["node_size"]), count)),
        link=link_of(known["link"]),
        network=link_of(known["network"]),
        host=host_of(known["host"]),
    )


def device_names() -> list[str]:
    """Return the names of all accelerators."""
    return list(_tables()["accelerators"])


def device_of(name: str, known: Mapping[str, Any] | None = None) -> Device:
    """Return one accelerator of the table."""
    known = _entry(name) if known is None else known
    return Device(
        name=_canonical(name) if "name" not in known else str(known["name"]),
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


def _parse_part(part: str, text: str) -> tuple[int, str]:
    match = _NAME.fullmatch(part.strip())
    if match is None:
        raise PlanError(
            f"hardware {text!r} is not a count and a device", fix="write it as 64xh100-80g, a YAML file, or here"
        )
    count = int(match[1] or 1)
    if count < 1:
        raise PlanError(f"hardware {text!r} has no device", fix="give a count of 1 or more")
    return count, _canonical(match[2].lower())


def _canonical(name: str) -> str:
    table = _tables()["accelerators"]
    if name in table:
        return name
    for known, entry in table.items():
        if name in entry.get("aliases", ()):
            return str(known)
    raise UnknownNameError("accelerator", name, [*table, *(a for e in table.values() for a in e.get("aliases", ()))])


def _entry(name: str) -> dict[str, Any]:
    tables = _tables()
    defaults, entry = tables["defaults"], tables["accelerators"][_canonical(name)]
    return {**defaults, **entry, "efficiency": {**defaults["efficiency"], **entry.get("efficiency", {})}}


def _read_file(path: str) -> Cluster:
    from piledriver.core.errors import MissingFileError

    if not os.path.exists(path):
        raise MissingFileError(path, fix="name a YAML file of hardware, or write it as 64xh100-80g")
    with open(path, encoding="utf-8") as file:
        given = yaml.safe_load(file)
    if not isinstance(given, dict) or "device" not in given:
        raise PlanError(f"{path} names no device", fix="write device: h100-80g and count: 64, or its own figures")
    allowed = {"device", "count", "node_size", "link", "network", "host"}
    for key in given:
        if key not in allowed:
            raise UnknownNameError(f"key of {path}:", str(key), allowed)
    device = given["device"]
    changes = {key: value for key, value in given.items() if key not in ("device", "count")}
    base = device if isinstance(device, str) else str(device.get("like", "h100-80g"))
    if isinstance(device, dict):
        own = {key: value for key, value in device.items() if key != "like"}
        if "efficiency" in own:
            own["efficiency"] = {**_entry(base)["efficiency"], **own["efficiency"]}
        changes.update(own)
    return make_cluster(base, int(given.get("count", 1)), **changes)


@functools.cache
def _tables() -> dict[str, Any]:
    folder = resources.files("piledriver.plan.hardware")
    found: dict[str, Any] = {}
    for name in ("accelerators", "links", "hosts"):
        found |= yaml.safe_load(folder.joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    return found
