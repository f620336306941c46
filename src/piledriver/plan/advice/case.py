"""`Case`: the numbers of a report that rules look at, each for one step of the slowest rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from piledriver.observe.profile.rank import RankProfile
from piledriver.observe.report.values import Advice, ReportValues
from piledriver.plan.blocks.operators import Operator
from piledriver.plan.hardware.cluster import Cluster
from piledriver.plan.time.rates import Rates

_ITEMSIZE = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
_PLANNED = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Seconds of the host for one kernel or operator, with the Python around it.
LAUNCH = 10e-6


@dataclass(frozen=True)
class Case:
    """A report on the machine that it was made on."""

    report: ReportValues
    cluster: Cluster

    @cached_property
    def rank(self) -> RankProfile:
        """The slowest rank."""
        return max(self.report.ranks, key=lambda one: one.wall_seconds)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the window of the slowest rank."""
        return self.rank.facts

    @property
    def on_device(self) -> bool:
        """Whether the steps ran on an accelerator."""
        return bool(self.facts.get("kernels"))

    @cached_property
    def step(self) -> float:
        """Seconds of a step: without the profiler where that was measured."""
        profiled = self.report.step_seconds
        plain = self.report.plain_step_seconds
        return profiled if plain is None else min(plain, profiled)

    def seconds(self, cause: str) -> float:
        """Seconds of a step by cause. The profiler slows the host down, so the host's wait is what the others leave."""
        per = {name: value / self.rank.steps for name, value in self.rank.seconds.items()}
        if cause == "host_wait":
            return max(0.0, self.step - sum(value for name, value in per.items() if name != "host_wait"))
        return per[cause]

    @property
    def profiled(self) -> float:
        """Seconds of a step under the profiler."""
        return self.rank.wall_seconds / self.rank.steps

    def without(self, overhead: float) -> float:
        """Return the step without an overhead of the host, which the profiler inflates as it inflates the step."""
        return min(self.step, max(0.0, self.profiled - overhead))

    def per_step(self, fact: str) -> float:
        """Return a fact of the window for one step; 0 if it was not recorded."""
        return float(self.facts.get(fact) or 0.0) / self.rank.steps

    @property
    def launching(self) -> float:
        """Seconds of the host for the kernels of a step: less work for each kernel makes no step faster than this."""
        return self.per_step("kernels") * LAUNCH

    def waited(self, part: str) -> float:
        """Seconds that a step waited for a part of the loop, such as the tokeniser."""
        found = [row.waited_seconds for row in self.rank.input_output if row.name == part]
        return sum(found) / self.rank.steps

    @cached_property
    def batches(self) -> dict[str, float]:
        """Calls, samples, tokens and padding of a step."""
        return {name: value / self.rank.steps for name, value in self.facts.get("batches", {}).items()}

    @cached_property
    def micro_batches(self) -> float:
        """Micro-batches of a step: forwards, each with a backward of its own."""
        return min(self.batches.get("calls", 1.0), max(1.0, round(self.per_step("backward_passes"))))

    @cached_property
    def rows(self) -> int:
        """The dimension of matrix products that grows with the micro-batch: rows of one product, depth of another."""
        shapes = self.facts.get("shapes", ())
        both = {int(row["m"]) for row in shapes} & {int(row["k"]) for row in shapes}
        calls = max(1.0, self.batches.get("calls", 1.0))
        for name in ("tokens", "samples"):
            if (found := round(self.batches.get(name, 0.0) / calls)) in both:
                return found
        return min(both, default=0)

    def product_seconds(self, row: dict[str, Any], *, precision: str | None = None, rows: float = 1.0) -> float:
        """Return the planner's seconds for one product of the profile, in a precision and with larger micro-batches."""
        kind = precision or str(row["precision"])
        m, n, k, groups = int(row["m"]), int(row["n"]), int(row["k"]), int(row["groups"])
        if rows != 1:
            # The gradient of a weight sums over the micro-batch, which is its depth.
            m, k = (m, int(k * rows)) if k == self.rows != m else (int(m * rows), k)
        size = _ITEMSIZE.get(kind, 4)
        operator = Operator(
            "product",
            "matmul",
            flops=2.0 * m * n * k * groups,
            bytes=float(size * groups * (m * k + k * n + m * n)),
            shape=(m, n, k),
            groups=groups,
        )
        device = self.cluster.device
        if device.kind == "cpu":  # no tiles to fill: the larger of arithmetic and memory
            return max(operator.flops / device.peak("fp32"), operator.bytes / device.bandwidth)
        return Rates(device, _PLANNED.get(kind, "fp32")).seconds(operator)

    def merged_seconds(self, row: dict[str, Any], merged: int) -> float:
        """Return the seconds for one product of the profile if this many micro-batches were one.

        On a CPU, what the profile measured beyond the arithmetic is its memory traffic: most of that is the weights',
        which a larger micro-batch moves once. The two add up, because a core that waits for memory computes little.
        """
        measured = float(row["seconds"]) / max(1, int(row["calls"]))
        if self.cluster.device.kind != "cpu":
            before, after = self.product_seconds(row), self.product_seconds(row, rows=merged) / merged
            return measured * min(1.0, after / before) if before > 0 else measured
        m, n, k, groups = int(row["m"]), int(row["n"]), int(row["k"]), int(row["groups"])
        arithmetic = 2.0 * m * n * k * groups / self.cluster.device.peak("fp32")
        moving = max(0.0, measured - arithmetic)
        grown = (m, k * merged) if k == self.rows != m else (m * merged, k)
        larger = (grown[0] * grown[1] + grown[1] * n + grown[0] * n) / (m * k + k * n + m * n)
        return min(measured, arithmetic + moving * larger / merged)

    def advice(self, rule: str, title: str, evidence: str, change: str, predicted: float) -> Advice | None:
        """Return advice if it promises at least 3%."""
        predicted = max(predicted, 0.02 * self.step)
        if predicted > 0.97 * self.step:
            return None
        return Advice(
            rule=rule,
            title=title,
            evidence=evidence,
            change=change,
            step_seconds=self.step,
            predicted_seconds=predicted,
        )


def share(part: float, whole: float) -> str:
    """Return a part as a percentage of a whole.

    >>> share(1, 4)
    '25%'
    """
    return f"{part / whole:.0%}" if whole > 0 else "0%"


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds.

    >>> milliseconds(0.0123)
    '12.3 ms'
    """
    return f"{seconds * 1e3:.3g} ms"
