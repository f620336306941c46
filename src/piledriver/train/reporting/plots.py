"""Plots of a run's metrics: loss, learning rate, throughput, validation bits per byte by source."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from piledriver.core import storage
from piledriver.core.errors import MissingDependencyError
from piledriver.train.reporting.metrics import read_metrics

FOLDER = "plots"
_BLUE, _PALE, _GREY, _RED = "#2f6f9f", "#a9c6dc", "#7a8794", "#c0392b"
# Distinguishable with most colour deficiencies (Okabe and Ito, 2008).
_COLOURS = (_BLUE, "#d08f3a", "#3a8f6e", "#a05a9c", "#b5493a", "#8a8d2f", "#5b6b7a", "#d57fa8", "#4db3c9", "#8c6b4f")
_VALIDATION = "validation/"

Rows = Sequence[dict[str, Any]]


def save_plots(run: storage.Location) -> list[str]:
    """Draw the metrics of a run into its folder `plots`; return the paths of the files."""
    rows = read_metrics(run)
    drawings: dict[str, Callable[[Rows], Any]] = {
        "loss": loss_plot,
        "learning_rate": learning_rate_plot,
        "throughput": throughput_plot,
    }
    if any(_sources(row) for row in rows):
        drawings["validation"] = validation_plot
    saved = []
    for name, draw in drawings.items():
        if rows:
            path = os.path.join(run, FOLDER, f"{name}.png")
            with storage.atomic_write(path) as file:
                draw(rows).savefig(file, format="png", dpi=130)
            saved.append(path)
    return saved


def loss_plot(rows: Rows) -> Any:
    """Draw the loss of every step, its running mean, and marks at skipped updates."""
    figure, axes = _axes("Training loss", "nats per token")
    good = [row for row in rows if row["loss"] is not None]
    tokens, losses = [row["tokens"] for row in good], [row["loss"] for row in good]
    axes.plot(tokens, losses, color=_PALE, linewidth=0.9)
    learned = [(row["tokens"], row["loss"]) for row in good if not row.get("skipped")]
    means = _running_mean([loss for _, loss in learned])
    axes.plot([at for at, _ in learned], means, color=_BLUE, linewidth=1.8)
    skipped = [row for row in good if row.get("skipped")]
    if skipped:
        xs, ys = [row["tokens"] for row in skipped], [row["loss"] for row in skipped]
        axes.plot(xs, ys, "x", color=_RED, markersize=6, label="update skipped")
        axes.legend(frameon=False)
    if means:
        # A spike of a thousand must not flatten the rest; the first loss is always inside.
        ordered = sorted(losses)
        high = max(ordered[int(0.995 * (len(ordered) - 1))], means[-1], learned[0][1])
        span = max(high - ordered[0], 1e-6)
        axes.set_ylim(ordered[0] - 0.05 * span, high + 0.05 * span)
        axes.annotate(
            f"{means[-1]:.3f}", (learned[-1][0], means[-1]), xytext=(4, 0),
            textcoords="offset points", va="center", color=_BLUE, annotation_clip=False,
        )  # fmt: skip
    return figure


def learning_rate_plot(rows: Rows) -> Any:
    """Draw the learning rate of every step."""
    figure, axes = _axes("Learning rate", "")
    axes.plot([row["tokens"] for row in rows], [row["learning_rate"] for row in rows], color=_BLUE, linewidth=1.8)
    axes.set_ylim(bottom=0)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    return figure


def throughput_plot(rows: Rows) -> Any:
    """Draw tokens per second of every step and their running mean; MFU on the right axis if known."""
    figure, axes = _axes("Throughput", "tokens per second")
    tokens, rates = [row["tokens"] for row in rows], [row["tokens_per_second"] for row in rows]
    axes.plot(tokens, rates, color=_PALE, linewidth=0.9)
    axes.plot(tokens, _running_mean(rates), color=_BLUE, linewidth=1.8)
    axes.set_ylim(0, 1.1 * max(rates))
    axes.yaxis.set_major_formatter(_engineering())
    last = rows[-1]
    if last.get("mfu"):
        per_token = last["mfu"] / last["tokens_per_second"]
        right = axes.secondary_yaxis("right", functions=(lambda x: 100 * per_token * x, lambda x: x / 100 / per_token))
        right.set_ylabel("MFU (%)", color=_GREY)
        right.tick_params(colors=_GREY)
        right.spines["right"].set_visible(False)
        axes.figure.axes[0].spines["right"].set_visible(False)
    return figure


def validation_plot(rows: Rows) -> Any:
    """Draw bits per byte of validation text by source, the total in black; the legend has the last values."""
    figure, axes = _axes("Validation", "bits per byte (lower is better)", height=4.2)
    measured = [row for row in rows if _sources(row)]
    names = list(dict.fromkeys(name for row in measured for name in _sources(row)))
    ordered = sorted(names, key=lambda name: -_last(measured, name))
    for number, name in enumerate(ordered):
        points = [
            (row["tokens"], row[_VALIDATION + name]) for row in measured if row.get(_VALIDATION + name) is not None
        ]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        together = name == "all"
        axes.plot(
            xs, ys, color="#1c2733" if together else _COLOURS[number % len(_COLOURS)],
            linewidth=2.2 if together else 1.4, marker="o", markersize=3, zorder=3 if together else 2,
            label=f"{name}  {ys[-1]:.3f}",
        )  # fmt: skip
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    return figure


def _axes(title: str, unit: str, height: float = 3.4) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("matplotlib", extra="plots", purpose="plots of a run") from error

    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("tokens")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_formatter(_engineering())
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6eaee", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _engineering() -> Any:
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return the means over an eightieth of the run to either side."""
    reach = len(values) // 80
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - reach, 0), np.minimum(at + reach + 1, len(values))
    return [float(mean) for mean in (sums[high] - sums[low]) / (high - low)]


def _sources(row: dict[str, Any]) -> list[str]:
    return [name.removeprefix(_VALIDATION) for name in row if name.startswith(_VALIDATION)]


def _last(rows: Rows, name: str) -> float:
    values = [row[_VALIDATION + name] for row in rows if row.get(_VALIDATION + name) is not None]
    return float(values[-1]) if values else 0.0
