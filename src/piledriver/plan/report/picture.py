"""A plan as a picture: memory by phase as stacked bars, throughput against the number of devices."""

from __future__ import annotations

from typing import Any

from piledriver.core.lazy import import_optional
from piledriver.plan.memory.phases import CATEGORIES
from piledriver.plan.result import Plan

FORMATS = (".png", ".svg", ".pdf", ".jpg")
_GIB = 2**30


def save_picture(plan: Plan, path: str) -> None:
    """Write the picture of a plan to a file (one of `FORMATS` by its name)."""
    import_optional("matplotlib", extra="plots", purpose="the picture of a plan")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    FigureCanvasAgg(figure)
    memory, scaling = figure.subplots(1, 2)
    _draw_memory(memory, plan)
    _draw_scaling(scaling, plan)
    figure.suptitle(f"{plan.name} on {plan.cluster.name}")
    figure.savefig(path, dpi=120)


def _draw_memory(axes: Any, plan: Plan) -> None:
    timeline = plan.best.worst
    names = [phase.name for phase in timeline.phases]
    below = [0.0] * len(names)
    for category in CATEGORIES:
        heights = [phase.by_category()[category] / _GIB for phase in timeline.phases]
        if any(heights):
            axes.bar(names, heights, bottom=below, label=category)
            below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.axhline(plan.best.capacity / _GIB, color="black", linestyle="--", linewidth=1, label="device")
    axes.set_ylabel("GiB")
    axes.set_title(f"memory by phase, {timeline.rank}")
    axes.tick_params(axis="x", labelrotation=35)
    axes.legend(fontsize=7)


def _draw_scaling(axes: Any, plan: Plan) -> None:
    points = plan.scaling()
    counts = [point["devices"] for point in points]
    axes.loglog(counts, [point["tokens_per_second"] for point in points], marker="o", label="predicted")
    if points:
        first = points[0]
        per = first["tokens_per_second"] / first["devices"]
        axes.loglog(counts, [per * count for count in counts], linestyle=":", color="grey", label="linear")
    axes.set_xlabel("devices")
    axes.set_ylabel("tokens/s")
    axes.set_title("throughput, batch in proportion")
    axes.legend()
