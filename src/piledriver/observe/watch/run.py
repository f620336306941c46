"""One run folder: its state from the end of its files, and its contents on request."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator
from typing import Any

from piledriver.core.config import load_yaml
from piledriver.observe.watch.discover import METRICS
from piledriver.observe.watch.files import read_head, read_tail, status
from piledriver.observe.watch.rows import numbers_of, parse_row

_TAIL = 64 << 10
_SMALL_FILE = 256 << 10
_LOG_LINES = 400
_SAMPLES = 40
_LEAVES = 1000
_LIVE_S = 90.0
_LOSSES = ("loss", "train/loss", "train_loss", "training_loss")
_SHOWN = ("tokens_per_second", "mfu", "validation/all", "memory_gib")
_LOGS = ("log.txt", "train.log", "output.log", "stdout.log")


class Run:
    """A run folder. Every method reads a bounded number of bytes."""

    def __init__(self, path: str, name: str) -> None:
        self.path, self.name = path, name
        self.id = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        self.metrics = os.path.join(path, METRICS)
        self._seen: tuple[int, int, int] | None = None
        self._summary: dict[str, Any] = {}
        self._total: float | None = None

    def file(self, *names: str) -> str:
        """Return the path of a file of the run."""
        return os.path.join(self.path, *names)

    def state(self) -> tuple[int, int, int] | None:
        """Return what changes when a row is written."""
        return status(self.metrics)

    def summary(self) -> dict[str, Any]:
        """Return name, state, last step and last values; read again only if the file has changed."""
        found = self.state()
        if found is None or found != self._seen:
            self._seen = found
            self._summary = self._read_summary()
        changed_at = found[2] / 1e9 if found is not None else _changed_at(self.path)
        step, total = self._summary.get("step"), self._total
        if total is not None and step is not None and step >= total:
            state = "finished"
        elif time.time() - changed_at < _LIVE_S:
            state = "live"
        else:
            state = "stopped" if total is not None else "ended"
        return {
            "id": self.id,
            "name": self.name,
            "state": state,
            "changed": changed_at,
            "bytes": found[1] if found is not None else 0,
            "total": total,
            **self._summary,
        }

    def _read_summary(self) -> dict[str, Any]:
        if self._total is None:
            matched = re.search(
                rb"(?m)^run:\n(?:  .*\n)*?  steps: (\d{1,15})$", read_tail(self.file("resolved.yaml"), _TAIL)
            )
            self._total = float(matched[1]) if matched else None
        lines = read_tail(self.metrics, _TAIL).split(b"\n")
        last: dict[str, float] = {}
        validated = False
        # The last line may be half-written; the first one of the tail may be cut.
        for line in reversed(lines[-40:]):
            if not line or (last and (validated or b"validation/all" not in line)):
                continue
            row = parse_row(line)
            if row is None:
                continue
            found = dict(numbers_of(row))
            validated = validated or "validation/all" in found
            last = {**found, **last}
        loss = next((last[name] for name in _LOSSES if name in last), None)
        values = {"step": last.get("step"), "tokens": last.get("tokens"), "loss": loss}
        values |= {name: last[name] for name in _SHOWN if name in last}
        return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}

    def config(self) -> dict[str, str]:
        """Return the config as {dotted key: text}, from `resolved.yaml`, `config.yaml` or `config.json`."""
        for name in ("resolved.yaml", "config.yaml", "config.json"):
            text = read_head(self.file(name), _SMALL_FILE)
            if text:
                return dict(_leaves(_parsed(name, text)))
        return {}

    def prediction(self) -> dict[str, Any]:
        """Return the predicted tokens/s, memory and their parts, and what was measured; {} without a prediction."""
        text = read_head(self.file("prediction.json"), _SMALL_FILE)
        try:
            found = json.loads(text)
            seconds = found["time"]["step_seconds"]
            known = {
                "step_seconds": seconds,
                "tokens_per_second": found["batch"] * found["length"] / seconds,
                "memory_gib": found["memory"]["allocated_gib"],
                "mfu": (found["time"].get("mfu")),
                "phase": str(found["memory"].get("phase", ""))[:200],
                "hardware": str(found.get("hardware", ""))[:200],
                "owners": [
                    {"name": f"{owner['category']}: {owner['name']}"[:200], "gib": float(owner["gib"])}
                    for owner in found["memory"]["owners"][:8]
                ],
                "parts": {str(name)[:80]: float(value) for name, value in list(found["time"]["parts"].items())[:20]},
                "measured": {
                    str(name)[:80]: float(value) for name, value in list((found.get("measured") or {}).items())[:8]
                },
            }
        except (ValueError, TypeError, KeyError, ZeroDivisionError, AttributeError, RecursionError):
            return {}
        return {name: value for name, value in known.items() if value is not None}

    def samples(self) -> list[dict[str, Any]]:
        """Return the latest generated texts of `samples.jsonl`."""
        found: list[dict[str, Any]] = []
        for line in read_tail(self.file("samples.jsonl"), _SMALL_FILE).split(b"\n"):
            row = parse_row(line) if line else None
            if row is not None:
                step = row.get("step")
                texts: dict[str, Any] = {
                    name: str(row[name])[:4000] for name in ("prompt", "text", "source") if name in row
                }
                found.append({"step": step if isinstance(step, int) else None, **texts})
        return found[-_SAMPLES:]

    def log_tail(self) -> dict[str, Any]:
        """Return the last lines of the run's log."""
        for name in _LOGS:
            text = read_tail(self.file(name), _TAIL)
            if text:
                lines = text.decode("utf-8", errors="replace").splitlines()[-_LOG_LINES:]
                return {"file": name, "lines": [line[:2000] for line in lines]}
        return {"file": None, "lines": []}

    def reports(self) -> list[str]:
        """Return the names of HTML reports in the folder, such as those of `piledriver profile`."""
        found = []
        for folder in ("", "profile"):
            try:
                with os.scandir(self.file(folder) if folder else self.path) as listing:
                    names = [entry.name for entry in listing if entry.is_file(follow_symlinks=False)]
            except OSError:
                continue
            if folder and os.path.islink(self.file(folder)):
                continue
            found += [f"{folder}/{name}" if folder else name for name in names if name.endswith(".html")]
        return sorted(found)[:20]


def _changed_at(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _parsed(name: str, text: bytes) -> Any:
    try:
        if name.endswith(".json"):
            return json.loads(text)
        return load_yaml(text)
    except Exception:  # whatever a hostile file makes a parser raise
        return {}


def _leaves(value: Any) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, text) of nested mappings; a bounded number, because YAML aliases can nest without end."""
    waiting: list[tuple[str, Any]] = [("", value)]
    for _ in range(_LEAVES):
        if not waiting:
            return
        key, member = waiting.pop()
        if isinstance(member, dict):
            names = list(member)[:_LEAVES]
            waiting += [(f"{key}.{name}"[1 if not key else 0 :][:200], member[name]) for name in reversed(names)]
        else:
            yield key, (str(member) if not isinstance(member, list) else f"list of {len(member)}")[:400]
