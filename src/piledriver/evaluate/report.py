"""Scores as a table, as JSON and as a bar chart, with the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib import resources
from typing import Any

import yaml

from piledriver.core import storage
from piledriver.core.errors import MissingDependencyError
from piledriver.evaluate.bits import Figures


@cache
def paper_figures() -> dict[str, dict[str, float]]:
    """The Pile paper's bits per byte: source to model to figure."""
    table = yaml.safe_load((resources.files("piledriver.evaluate") / "paper.yaml").read_text(encoding="utf-8"))
    return {source: dict(zip(table["columns"], row, strict=True)) for source, row in table["rows"].items()}


def as_json(figures: Mapping[str, Figures], **about: Any) -> dict[str, Any]:
    """What `--json` prints: what was measured, how, and what the paper has for the same source."""
    paper = paper_figures()
    rows = {source: {**asdict(row), "paper": paper.get(source)} for source, row in figures.items()}
    return {**about, "bits_per_byte": rows}


def as_text(figures: Mapping[str, Figures]) -> str:
    """A table for the terminal."""
    paper = paper_figures()
    known = [source for source in figures if source in paper and source != "all"]
    width = max(len(source) for source in figures)
    beside = "  GPT-2 small / GPT-3 davinci (the paper's)" if known else ""
    lines = [f"{'source':<{width}}  {'BPB':>7}  {'95% interval':>17}  {'documents':>9}  {'MB':>8}{beside}"]
    for source, row in figures.items():
        interval = f"{row.low:.4f} - {row.high:.4f}" if row.low == row.low else ""
        line = (
            f"{source:<{width}}  {row.bits_per_byte:>7.4f}  {interval:>17}  {row.documents:>9}  {row.bytes / 1e6:>8.2f}"
        )
        if source in known:
            line += f"  {paper[source]['gpt2-small']:.4f} / {paper[source]['gpt3-davinci']:.4f}"
        lines.append(line)
    return "\n".join(lines)


def save_chart(figures: Mapping[str, Figures], path: storage.Location, title: str = "Bits per byte") -> None:
    """A bar for each source, with its interval, as PNG."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", extra="plots", purpose="the bar chart") from error

    names = list(figures)
    values = [figures[name].bits_per_byte for name in names]
    errors = [
        [
            max(0.0, value - figures[name].low) if figures[name].low == figures[name].low else 0.0
            for name, value in zip(names, values, strict=True)
        ],
        [
            max(0.0, figures[name].high - value) if figures[name].high == figures[name].high else 0.0
            for name, value in zip(names, values, strict=True)
        ],
    ]
    figure = Figure(figsize=(8, 0.6 + 0.38 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    colours = ["#9aa5b1" if name == "all" else "#2f6f9f" for name in names]
    axes.barh(range(len(names)), values, xerr=errors, color=colours, ecolor="#444444", capsize=2)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("bits per byte (lower is better)")
    axes.set_title(title)
    for at, value in enumerate(values):
        axes.text(0.01 * max(values), at, f"{value:.3f}", va="center", ha="left", color="white", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    with storage.atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=130)
