"""`Plan`: the layout that was chosen, with its predicted memory and time, and why the others lost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from piledriver.core.config import to_mapping
from piledriver.engine.layout import Layout
from piledriver.plan.hardware.cluster import Cluster
from piledriver.plan.prediction import Prediction, Workload, predict
from piledriver.plan.search.choose import Loser, reason_slower
from piledriver.plan.time.step import PARTS

_GIB = 2**30
CURVE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 10_000)
"""Device counts of a scaling curve."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout with its predicted memory and time, the runners-up, and a reason for every other layout."""

    name: str
    """The model, as it was given."""
    best: Prediction
    others: tuple[Prediction, ...]
    """The next best, fastest first."""
    losers: tuple[Loser, ...]
    counted: int
    """Layouts and micro-batches that were looked at."""

    @property
    def layout(self) -> Layout:
        """The chosen layout, with every size resolved."""
        return self.best.layout

    @property
    def cluster(self) -> Cluster:
        """The devices that the plan is for."""
        return self.best.cluster

    @property
    def workload(self) -> Workload:
        """What is trained."""
        return self.best.workload

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all devices in a second."""
        return self.best.tokens_per_second

    @property
    def why(self) -> str:
        """The choice and its reason in one line."""
        best = self.best
        text = (
            f"{best.layout!r}, micro-batches of {best.sequences} x {self.workload.length} tokens: predicted "
            f"{best.tokens_per_second:,.0f} tokens/s (MFU {100 * best.mfu:.0f}%), "
            f"{best.worst.allocated / _GIB:.1f} of {best.capacity / _GIB:.0f} GiB"
        )
        if self.others:
            text += f"; next: {self.others[0].layout!r}, {reason_slower(self.others[0], best)}"
        return text

    def scaling(self, counts: tuple[int, ...] = CURVE) -> list[dict[str, float]]:
        """Return throughput against the number of devices, with the batch of one device and this layout's axes."""
        best, found = self.best, []
        fixed = best.layout.tp * best.layout.cp * best.layout.pp
        per_rank = best.sequences * best.accumulation
        for count in counts:
            if count % fixed or (self.cluster.others and count != self.cluster.count):
                continue
            layout = replace(best.layout, dp_replicate=None, dp_shard=None)
            data = count // fixed
            workload = replace(self.workload, batch=per_rank * data)
            cluster = replace(
                self.cluster.resized(count), node_size=min(max(self.cluster.node_size, min(count, 8)), count)
            )
            made = predict(workload, layout, cluster, sequences=best.sequences)
            found.append(
                {
                    "devices": count,
                    "tokens_per_second": made.tokens_per_second,
                    "mfu": made.mfu,
                    "allocated_gib": made.worst.allocated / _GIB,
                    "fits": float(made.fits),
                }
            )
        return found

    def as_mapping(self) -> dict[str, Any]:
        """Return the plan as plain data, for JSON."""
        return {
            "model": self.name,
            "hardware": self.cluster.name,
            "batch": {
                "sequences": self.workload.batch,
                "length": self.workload.length,
                "tokens": self.workload.tokens,
            },
            "optimizer": self.workload.optimizer,
            **prediction_mapping(self.best),
            "others": [prediction_mapping(one) for one in self.others],
            "losers": [
                {"layout": layout_mapping(one.layout), "micro_batch": one.sequences, "reason": one.reason}
                for one in self.losers
            ],
            "layouts_counted": self.counted,
            "scaling": self.scaling(),
        }


def layout_mapping(layout: Layout) -> dict[str, Any]:
    """Return the fields of a layout that differ from the defaults."""
    plain = {name: field.default for name, field in Layout.__dataclass_fields__.items()}
    return {name: value for name, value in to_mapping(layout).items() if value != plain[name]}


def prediction_mapping(one: Prediction) -> dict[str, Any]:
    """Return a prediction as plain data."""
    timeline = one.worst
    return {
        "layout": layout_mapping(one.layout),
        "micro_batch": one.sequences,
        "accumulation": one.accumulation,
        "micro_batch_tokens": one.micro_batch_tokens,
        "compiled": one.compiled,
        "fits": one.fits,
        "memory": {
            "allocated_gib": timeline.allocated / _GIB,
            "reserved_gib": timeline.reserved / _GIB,
            "driver_gib": timeline.driver / _GIB,
            "host_gib": timeline.host / _GIB,
            "disk_gib": timeline.disk / _GIB,
            "rank": timeline.rank,
            "phase": timeline.peak.name,
            "owners": [
                {"category": owner.category, "name": owner.name, "gib": owner.bytes / _GIB}
                for owner in timeline.largest()
            ],
            "timeline": [
                {
                    "rank": line.rank,
                    "phases": [
                        {
                            "phase": phase.name,
                            "gib": {name: size / _GIB for name, size in phase.by_category().items() if size},
                        }
                        for phase in line.phases
                    ],
                }
                for line in one.timelines
            ],
        },
        "collectives": [
            {"kind": call.kind, "axis": call.axis, "bytes": call.bytes, "count": call.count}
            for call in one.collectives()
        ],
        "time": {
            "step_seconds": one.time.total,
            "parts": {name: getattr(one.time, name) for name in PARTS},
            "tokens_per_second": one.tokens_per_second,
            "tokens_per_second_per_device": one.tokens_per_second / one.cluster.count,
            "mfu": one.mfu,
            "joules_per_token": one.joules_per_token,
            "dollars_per_billion_tokens": one.dollars(1e9),
        }
        if one.time.total
        else None,
    }
