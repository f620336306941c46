"""Parse hardware: names such as `64xh100-80g`, YAML files, or `here`."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any

import yaml

from piledriver.core.errors import MissingFileError, UnknownNameError
from piledriver.plan.errors import PlanError
from piledriver.plan.hardware.catalog import entry_of, known_name, make_cluster, make_device
from piledriver.plan.hardware.cluster import Cluster

# Figures of a device in a file.
_NUMBERS = ("speed", "memory", "bandwidth", "tile", "watts", "dollars")
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
    others = tuple((more, make_device(kind)) for more, kind in parts[1:])
    return Cluster(
        device=cluster.device,
        count=sum(more for more, _ in parts),
        node_size=cluster.node_size,
        link=cluster.link,
        network=cluster.network,
        host=cluster.host,
        others=others,
    )


def _parse_part(part: str, text: str) -> tuple[int, str]:
    match = _NAME.fullmatch(part.strip())
    if match is None:
        raise PlanError(
            f"hardware {text!r} is not a count and a device", fix="write it as 64xh100-80g, a YAML file, or here"
        )
    count = int(match[1] or 1)
    if count < 1:
        raise PlanError(f"hardware {text!r} has no device", fix="give a count of 1 or more")
    name = match[2].lower()
    try:
        return count, known_name(name)
    except UnknownNameError:
        if not name.isdigit():
            raise
    raise PlanError(f"hardware {text!r} names no device", fix=f"write it as {name}xh100-80g")


def _read_file(path: str) -> Cluster:
    if not os.path.exists(path):
        raise MissingFileError(path, fix="name a YAML file of hardware, or write it as 64xh100-80g")
    with open(path, encoding="utf-8") as file:
        try:
            given = yaml.safe_load(file)
        except yaml.YAMLError as error:
            raise PlanError(
                f"{path} is not valid YAML: {' '.join(str(error).split())}", fix="correct that line"
            ) from error
    if not isinstance(given, dict) or "device" not in given:
        raise PlanError(f"{path} names no device", fix="write device: h100-80g and count: 64, or its own figures")
    allowed = {"device", "count", "node_size", "link", "network", "host", "others"}
    for key in given:
        if key not in allowed:
            raise UnknownNameError(f"key of {path}:", str(key), allowed)
    base, own = _device(given["device"], path)
    changes = {key: value for key, value in given.items() if key not in ("device", "count", "others")}
    if "node_size" in changes:
        changes["node_size"] = _count(changes["node_size"], f"{path}: node_size")
    first = make_cluster(base, _count(given.get("count", 1), f"{path}: count"), **changes, **own)
    others = []
    for group in given.get("others") or ():
        if not isinstance(group, dict) or not {"device"} <= group.keys() <= {"device", "count"}:
            raise PlanError(f"{path}: others has {group!r}", fix="list groups of device and count")
        name, own = _device(group["device"], path)
        count = _count(group.get("count", 1), f"{path}: count")
        others.append((count, make_device(name, {**entry_of(name), **own})))
    return replace(first, count=first.count + sum(count for count, _ in others), others=tuple(others))


def _count(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{where} is {value!r}", fix="write a whole number, 1 or more")
    return value


def _device(device: Any, path: str) -> tuple[str, dict[str, Any]]:
    """Return the table's name of a device in a file, and what differs: {like: NAME, speed: SHARE, memory: GIB, ...}."""
    if isinstance(device, str):
        return device, {}
    if not isinstance(device, dict):
        raise PlanError(
            f"{path}: device is {device!r}", fix="write a name such as h100-80g, or {like: NAME, memory: GIB}"
        )
    base = str(device.get("like", "h100-80g"))
    known = entry_of(base)
    allowed = {"like", "speed", "name", *known}
    for key, value in device.items():
        if key not in allowed:
            raise UnknownNameError(f"key of the device of {path}:", str(key), allowed)
        if key in _NUMBERS and not (isinstance(value, int | float) and value > 0):
            raise PlanError(f"{path}: {key} of the device is {value!r}", fix="write a number above 0")
    own = {key: value for key, value in device.items() if key not in ("like", "speed")}
    if "efficiency" in own:
        own["efficiency"] = {**known["efficiency"], **own["efficiency"]}
    speed = float(device.get("speed", 1.0))
    if speed != 1.0:
        peaks = own.get("peaks", known["peaks"])
        own["peaks"] = {dtype: speed * float(rate) for dtype, rate in peaks.items()}
        own["bandwidth"] = speed * float(own.get("bandwidth", known["bandwidth"]))
        own.setdefault("name", f"{known_name(base)}-at-{speed:g}")
    return base, own
