"""`Report`: where time and memory of profiled steps went, on every rank, as text, JSON and one HTML page."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

from piledriver.core.storage import atomic_write
from piledriver.observe.memory.peak import peak_values
from piledriver.observe.profile.rank import RankProfile
from piledriver.observe.report.page import report_page
from piledriver.observe.report.ranks import critical_path, stragglers, traffic
from piledriver.observe.report.text import report_text
from piledriver.observe.report.values import ReportValues


class Report(ReportValues):
    """The report of a profile.

    >>> import torch
    >>> from piledriver.observe import profile_step
    >>> model = torch.nn.Linear(4, 4)
    >>> report = profile_step(lambda: model(torch.ones(2, 4)).sum().backward(), model)
    >>> report.text().startswith("profile: 1 rank(s), 3 step(s)")
    True
    """

    __slots__ = ()

    @classmethod
    def of(
        cls, ranks: Sequence[RankProfile], title: str = "profile", plain_step_seconds: float | None = None
    ) -> Report:
        """Return the report of some ranks' profiles."""
        ordered = sorted(ranks, key=lambda one: one.rank)
        return cls(
            title,
            ordered,
            traffic(ordered),
            stragglers(ordered),
            critical_path(ordered),
            plain_step_seconds=plain_step_seconds,
        )

    def text(self) -> str:
        """Return the report for a terminal."""
        return report_text(self)

    def page(self) -> str:
        """Return one HTML page that needs no other file."""
        return report_page(self.title, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        ranks = []
        for one in self.ranks:
            row = {name: _plain(getattr(one, name)) for name in _fields(one) if name not in ("memory", "modules")}
            row["memory"] = [peak_values(peak) for peak in one.memory]
            row["modules"] = [
                {**_plain(module), "roofline_share": round(module.roofline_share, 4)} for module in one.modules
            ]
            row["flops"] = one.flops
            ranks.append(row)
        return {
            "title": self.title,
            "error": self.error,
            "step_seconds": self.step_seconds,
            "plain_step_seconds": self.plain_step_seconds,
            "ranks": ranks,
            "traffic": [
                {
                    **_plain(row),
                    "bytes": row.bytes,
                    "algorithm_bandwidth": row.algorithm_bandwidth,
                    "bus_bandwidth": row.bus_bandwidth,
                }
                for row in self.traffic
            ],
            "stragglers": _plain(self.stragglers),
            "critical_path": _plain(self.critical_path),
            "advice": [{**_plain(one), "gain": one.gain} for one in self.advice],
        }

    def save(self, folder: str) -> str:
        """Write report.txt, report.json and report.html into a folder; return it."""
        os.makedirs(folder, exist_ok=True)
        self.folder = folder
        for name, content in (
            ("report.txt", self.text() + "\n"),
            ("report.json", json.dumps(self.to_json(), indent=1)),
            ("report.html", self.page()),
        ):
            with atomic_write(os.path.join(folder, name)) as file:
                file.write(content.encode())
        return folder


def _fields(value: Any) -> list[str]:
    return [one.name for one in dataclasses.fields(value)]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in _fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
