"""Metrics of a run: one JSON line per step in its folder, and the trackers of its config."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

from piledriver.core import storage
from piledriver.observe.trackers import TrackerHub, choose_trackers, make_trackers

FILE = "metrics.jsonl"


class MetricLog:
    """Writes metrics; made by `metric_log`."""

    def __init__(self, file: IO[str] | None, hub: TrackerHub) -> None:
        self._file, self._hub = file, hub

    def write(self, figures: Mapping[str, Any]) -> None:
        """Write and flush one line; NaN and infinity become null, as JSON requires."""
        if self._file is None:
            return
        plain = {name: None if _is_no_number(value) else value for name, value in figures.items()}
        self._file.write(json.dumps(plain) + "\n")
        self._file.flush()
        self._hub.log({name: value for name, value in plain.items() if value is not None}, step=figures["step"])


@contextmanager
def metric_log(
    out: storage.Location, trackers: tuple[str, ...] | None, *, is_main: bool, config: Mapping[str, Any]
) -> Iterator[MetricLog]:
    """Open the metrics of a run folder; `trackers` None means TensorBoard if it is installed."""
    if trackers is None:
        trackers = ("tensorboard",) if importlib.util.find_spec("tensorboard") is not None else ()
    names = [name for name in trackers if name != "jsonl"]
    chosen = choose_trackers(names, logging_dir=os.fspath(out)) if names and is_main else []
    # Services group runs by project; for TensorBoard it is a folder beside the metrics.
    made = [
        make_trackers([name], "tensorboard" if name == "tensorboard" else "piledriver", os.fspath(out), {})
        for name in chosen
    ]
    hub = TrackerHub([tracker for few in made for tracker in few], is_main=is_main)
    if not is_main:
        yield MetricLog(None, hub)
        return
    with open(os.path.join(out, FILE), "a+b") as binary:
        if binary.tell() and binary.seek(-1, os.SEEK_END) >= 0 and binary.read(1) != b"\n":
            binary.write(b"\n")  # a crash truncated the last line
    with open(os.path.join(out, FILE), "a", encoding="utf-8") as file:
        hub.start(config=dict(config))
        try:
            yield MetricLog(file, hub)
        finally:
            hub.finish()


def read_metrics(out: storage.Location) -> list[dict[str, Any]]:
    """Return the metrics of a run by step; of a step that was repeated, the last ones."""
    path = storage.join(out, FILE)
    if not storage.exists(path):
        return []
    by_step: dict[int, dict[str, Any]] = {}
    for line in storage.read_bytes(path).splitlines():
        try:
            row = json.loads(line)
            by_step[row["step"]] = row
        except (ValueError, TypeError, KeyError):
            continue  # a line that a crash truncated (its step was repeated) or that is damaged
    return [by_step[step] for step in sorted(by_step)]


def _is_no_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
