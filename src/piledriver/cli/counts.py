"""Counts that several verbs take: positive numbers, and `--workers`."""

from __future__ import annotations

import argparse
import os
import sys


def positive(text: str) -> int:
    """A count that the user typed."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return _countable(text)


def zero_or_more(text: str) -> int:
    """A number that the user typed and that may be nothing."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return _countable(text)


def processes(text: str) -> int:
    """How many processes to start; as many as no machine has are a slip of the keyboard."""
    number, most = positive(text), max(1024, 4 * cores())
    if number > most:
        raise argparse.ArgumentTypeError(f"{text!r} processes are too many here, the most is {most}")
    return number


def _countable(text: str) -> int:
    if int(text) > sys.maxsize:
        raise argparse.ArgumentTypeError(f"{text!r} is more than can be counted, {sys.maxsize}")
    return int(text)


def add_workers(parser: argparse.ArgumentParser) -> None:
    """The option `--workers`."""
    parser.add_argument(
        "--workers", type=processes, default=cores(), metavar="N", help="processes (default: one a core)"
    )


def cores() -> int:
    """The cores that this process may run on, or all where the system cannot tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
