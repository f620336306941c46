"""Counts that several verbs take: positive numbers, and `--workers`."""

from __future__ import annotations

import argparse
import os


def positive(text: str) -> int:
    """A count that the user typed."""
    number = int(text) if text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return number


def zero_or_more(text: str) -> int:
    """A number that the user typed and that may be nothing."""
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def add_workers(parser: argparse.ArgumentParser) -> None:
    """The option `--workers`."""
    parser.add_argument(
        "--workers", type=positive, default=cores(), metavar="N", help="processes (default: one a core)"
    )


def cores() -> int:
    """The cores that this process may run on, or all where the system cannot tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
