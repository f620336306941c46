"""Report bits per byte as a table, JSON or a bar chart, beside the figures of the Pile paper."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib import resources
from typing import Any

from piledriver.core import storage
from piledriver.core.config import load_yaml
from piledriver.core.errors import MissingDependencyError
from piledriver.evaluate.bits import Figures


@cache
def paper_figures() -> dict[str, dict[str, float]]:
    """Return the bits per byte of the Pile paper: source -> model -> figure."""
    table = load_yaml((resources.files("piledriver.evaluate") / "paper.yaml").read_text(encoding="utf-8"))
    return {source: dict(zip(table["columns"], row, strict=True)) for source, row in table["rows"].items()}


def as_json(figures: Mapping[str, Figures], **about: Any) -> dict[str, Any]:
    """Return the figures as JSON data, with the settings `about` and the paper's figures; NaN becomes null."""
    paper = _papers(figures)
    rows = {source: {**_plain(row), "paper": paper.get(source)} for source, row in figures.items()}
    return {**about, "bits_per_byte": rows}


def _plain(row: Figures) -> dict[str, Any]:
    values = asdict(row)
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}


def _papers(figures: Mapping[str, Figures]) -> dict[str, dict[str, float]]:
    """Return the paper's figures; "all" only if the sources are exactly the paper's."""
    paper = paper_figures()
    return {source: row for source, row in paper.items() if source != "all" or set(figures) == set(paper)}


def as_text(figures: Mapping[str, Figures]) -> str:
    """Return the figures as a table for the terminal."""
    paper = _papers(figures)
    known = [source for source in figures if source in paper]
    width = max(len(source) for source in figures)
    beside = "  GPT-2 small / GPT-3 davinci (the paper's)" if known else ""
    lines = [f"{'source':<{width}}  {'BPB':>7}  {'95% interval':>17}  {'documents':>9}  {'bytes':>15}{beside}"]
    for source, row in figures.items():
        bits = f"{row.bits_per_byte:.4f}" if row.bytes else "-"
        interval = f"{row.low:.4f} - {row.high:.4f}" if math.isfinite(row.low) else ""
        line = f"{source:<{width}}  {bits:>7}  {interval:>17}  {row.documents:>9}  {row.bytes:>15,}"
        if source in known:
            line += f"  {paper[source]['gpt2-small']:.4f} / {paper[source]['gpt3-davinci']:.4f}"
        lines.append(line)
    return "\n".join(lines)


def save_chart(figures: Mapping[str, Figures], path: storage.Location, title: str = "Bits per byte") -> None:
    """Write a PNG bar chart: one bar per source, with its interval."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", extra="plots", purpose="the bar chart") from error

    names = [name for name, row in figures.items() if row.bytes]
    values = [figures[name].bits_per_byte for name in names]
    measured = [at for at, name in enumerate(names) if math.isfinite(figures[name].low)]
    rows = [(values[at], figures[names[at]]) for at in measured]
    errors = [
        [max(0.0, value - row.low) for value, row in rows],
        [max(0.0, row.high - value) for value, row in rows],
    ]
    figure = Figure(figsize=(8, 0.6 + 0.38 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    colours = ["#9aa5b1" if name == "all" else "#2f6f9f" for name in names]
    axes.barh(range(len(names)), values, color=colours)
    if measured:
        centres = [values[at] for at in measured]
        axes.errorbar(centres, measured, xerr=errors, fmt="none", ecolor="#444444", capsize=2)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("bits per byte (lower is better)")
    axes.set_title(title)
    for at, value in enumerate(values):
        axes.text(0.01 * max(values), at, f"{value:.3f}", va="center", ha="left", color="white", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    with storage.atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=130)
