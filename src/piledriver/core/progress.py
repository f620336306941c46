"""Progress of a long job: a live bar on a terminal, one line every few seconds in a log.

Progress is printed to standard error; standard output is for results.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO, TypeVar

T = TypeVar("T")


class Progress(Protocol):
    """The object that a job reports its progress to."""

    def advance(self, amount: float = 1) -> None:
        """Add to the amount done."""

    def note(self, text: str) -> None:
        """Set the text shown beside the figures, such as the current file or the last loss."""


@contextmanager
def progress(
    label: str, *, total: float | None = None, unit: str = "", stream: TextIO | None = None, every_seconds: float = 5.0
) -> Iterator[Progress]:
    """Show the progress of the work inside the block.

    >>> import sys
    >>> with progress("read", total=2, unit="files", stream=sys.stdout, every_seconds=60) as bar:
    ...     bar.advance(2)
    read: 2 of 2 files (100%) in 0 s
    """
    stream = stream or sys.stderr
    shown = _bar(label, total, unit, stream) if stream.isatty() else _lines(label, total, unit, stream, every_seconds)
    with shown as reporter:
        yield reporter


def track(items: Iterable[T], label: str, *, total: int | None = None, unit: str = "") -> Iterator[T]:
    """Yield the items and show progress."""
    with progress(label, total=total, unit=unit) as bar:
        for item in items:
            yield item
            bar.advance()


@contextmanager
def _bar(label: str, total: float | None, unit: str, stream: TextIO) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with RichProgress(*columns, console=Console(file=stream)) as rich:
        task = rich.add_task(label, total=total, figures="", note="")
        count = _Count(total, unit)

        class Bar:
            def advance(self, amount: float = 1) -> None:
                count.done += amount
                rich.update(task, advance=amount, figures=count.figures())

            def note(self, text: str) -> None:
                rich.update(task, note=text.replace("[", r"\["))

        try:
            yield Bar()
        except KeyboardInterrupt:
            rich.live.transient = True  # an interrupted job leaves no bar behind
            raise


@contextmanager
def _lines(
    label: str,
    total: float | None,
    unit: str,
    stream: TextIO,
    every_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Progress]:
    count = _Count(total, unit)
    started = last = clock()
    noted = ""

    class Lines:
        def advance(self, amount: float = 1) -> None:
            nonlocal last
            count.done += amount
            now = clock()
            if now - last >= every_seconds:
                last = now
                rate = count.done / (now - started)
                left = f", {duration((total - count.done) / rate)} left" if total and rate > 0 else ""
                print(
                    f"{label}: {count.figures()}, {short_number(rate)} {unit}/s{left}{noted}", file=stream, flush=True
                )

        def note(self, text: str) -> None:
            nonlocal noted
            noted = f" · {text}" if text else ""

    yield Lines()
    print(f"{label}: {count.figures()} in {duration(clock() - started)}{noted}", file=stream, flush=True)


class _Count:
    def __init__(self, total: float | None, unit: str) -> None:
        self.done: float = 0
        self.total = total
        self.unit = unit

    def figures(self) -> str:
        if not self.total:
            return f"{short_number(self.done)} {self.unit}".rstrip()
        return (
            f"{short_number(self.done)} of {short_number(self.total)} {self.unit}".rstrip()
            + f" ({100 * self.done / self.total:.0f}%)"
        )


def short_number(number: float) -> str:
    """Return a number in few characters.

    >>> short_number(1234), short_number(12_345), short_number(2.5)
    ('1234', '12.3k', '2.5')
    """
    for limit, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= limit:
            return f"{number / (1e3 if suffix == 'k' else limit):.1f}{suffix}"
    return f"{number:.0f}" if number == int(number) else f"{number:.1f}"


def duration(seconds: float) -> str:
    """Return seconds as text, such as `2 min 05 s`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
