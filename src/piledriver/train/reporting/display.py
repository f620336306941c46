"""Display of a run in progress: a live panel on a terminal, a line every few seconds in a log."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from piledriver.core.progress import duration, progress, short_number

_BARS = "▁▂▃▄▅▆▇█"


class Display(Protocol):
    """The interface that the training loop reports to."""

    def show(self, figures: Mapping[str, Any]) -> None:
        """Show the metrics of a step."""

    def say(self, text: str) -> None:
        """Print a message that stays on the screen, such as a spike or a roll-back."""


@contextmanager
def display(label: str, *, first_step: int, total_steps: int, is_main: bool = True) -> Iterator[Display]:
    """Show a run's steps on standard error, as a panel or as lines; ranks other than 0 show nothing."""
    if not is_main:
        yield _Nothing()
    elif sys.stderr.isatty():
        with _panel(label, first_step, total_steps, sys.stderr) as shown:
            yield shown
    else:
        since = f" from step {first_step}" if first_step else ""
        with progress(f"train {label}{since}", total=total_steps - first_step, unit="steps") as bar:
            yield _Lines(bar)


def described(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the metrics to display as (name, text).

    >>> described({"loss": 2.5, "tokens_per_second": 12345.0, "mfu": 0.41, "memory_gib": 1.5})
    [('loss', '2.500'), ('tokens/s', '12.3k'), ('MFU', '41%'), ('memory', '1.50 GiB')]
    """
    found = [("loss", f"{figures['loss']:.3f}" if figures["loss"] is not None else "not a number")]
    found.append(("tokens/s", short_number(figures["tokens_per_second"])))
    if figures.get("mfu") is not None:
        found.append(("MFU", f"{100 * figures['mfu']:.0f}%"))
    if figures.get("memory_gib") is not None:
        found.append(("memory", f"{figures['memory_gib']:.2f} GiB"))
    if figures.get("validation/all") is not None:
        found.append(("validation", f"{figures['validation/all']:.4f} BPB"))
    if figures.get("skipped_batches"):
        found.append(("skipped", f"{figures['skipped_batches']} batches"))
    return found


class _Nothing:
    def show(self, figures: Mapping[str, Any]) -> None:
        pass

    def say(self, text: str) -> None:
        pass


class _Lines:
    """Lines of a log, through `core.progress`."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._validation: Any = None
        self._step: int | None = None

    def show(self, figures: Mapping[str, Any]) -> None:
        self._validation = figures.get("validation/all", self._validation)
        parts = described({**figures, "validation/all": self._validation})
        self._bar.note(", ".join(f"{name} {text}" for name, text in parts))
        # Steps that are repeated after a roll-back are not progress.
        self._bar.advance(1 if self._step is None else figures["step"] - self._step)
        self._step = figures["step"]

    def say(self, text: str) -> None:
        print(f"train: {text}", file=sys.stderr, flush=True)


@contextmanager
def _panel(label: str, first_step: int, total_steps: int, stream: TextIO) -> Iterator[Display]:
    from rich.console import Console
    from rich.live import Live

    console = Console(file=stream)
    panel = _Panel(label, first_step, total_steps, console)
    with Live(panel, console=console, refresh_per_second=4) as live:
        try:
            yield panel
        except KeyboardInterrupt:
            live.transient = True  # an interrupted run leaves no panel behind
            raise
        live.refresh()


class _Panel:
    """A progress bar, the metrics, and the losses so far as a sparkline; drawn by rich's thread."""

    def __init__(self, label: str, first_step: int, total_steps: int, console: Any) -> None:
        self._label, self._total, self._console = label, total_steps, console
        self._step, self._figures = first_step, dict[str, Any]()
        self._losses: list[float] = []
        self._validations: list[float] = []
        self._started = time.monotonic()
        # (time, step) of about the last minute: the remaining time follows from the recent rate.
        self._recent: deque[tuple[float, int]] = deque([(self._started, first_step)], maxlen=60)

    def show(self, figures: Mapping[str, Any]) -> None:
        self._figures, self._step = dict(figures), int(figures["step"])
        if figures["loss"] is not None:
            self._losses.append(float(figures["loss"]))
            if len(self._losses) > 4096:
                self._losses = self._losses[::2]
        if figures.get("validation/all") is not None:
            self._validations.append(float(figures["validation/all"]))
        now = time.monotonic()
        if now - self._recent[-1][0] >= 1 or self._step < self._recent[-1][1]:
            self._recent.append((now, self._step))

    def say(self, text: str) -> None:
        self._console.print(f"[yellow]{text}[/yellow]", highlight=False)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(ratio=1)
        bar.add_column(justify="right", no_wrap=True)
        share = 100 * self._step / max(1, self._total)
        bar.add_row(
            ProgressBar(total=self._total, completed=self._step),
            f"{self._step:,} of {self._total:,} steps ({share:.0f}%)",
        )
        figures = Table.grid(expand=True, padding=(0, 2))
        cells = []
        for name, text in self._cells():
            figures.add_column(no_wrap=True)
            cells.append(Text.assemble((f"{name} ", "dim"), (text, "bold")))
        figures.add_row(*cells)
        width = max(10, self._console.width - 4)
        curve = Text(sparkline(self._losses, width), style="cyan", no_wrap=True)
        rows = [bar, figures, curve] if self._losses else [bar, figures]
        title = f"train {self._label}".replace("[", r"\[")
        return Panel(Group(*rows), title=title, title_align="left", border_style="dim")

    def _cells(self) -> list[tuple[str, str]]:
        shown = dict(self._figures)
        if self._validations:
            shown["validation/all"] = self._validations[-1]
        found = described(shown) if shown else []
        left = self._left()
        return [
            *found,
            ("left", "?" if left is None else duration(left)),
            ("run", duration(time.monotonic() - self._started)),
        ]

    def _left(self) -> float | None:
        (begin, first), (end, last) = self._recent[0], self._recent[-1]
        if last <= first or end <= begin:
            return None
        return (self._total - self._step) * (end - begin) / (last - first)


def sparkline(values: list[float], width: int) -> str:
    """Return values as a row of block characters; neighbours are averaged to fit `width`, outliers clipped.

    >>> sparkline([3, 2, 1, 0], 10)
    '█▆▃▁'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    size = max(1, -(-len(finite) // width))
    means = [sum(part) / len(part) for part in (finite[i : i + size] for i in range(0, len(finite), size))]
    low, high = min(means), sorted(means)[int(0.98 * (len(means) - 1) + 0.5)]
    span = (high - low) or 1.0
    return "".join(_BARS[min(7, max(0, round(7 * (value - low) / span)))] for value in means)
