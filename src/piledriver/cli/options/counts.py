"""Argument types of several verbs: counts, numbers of processes, and `--workers`."""

from __future__ import annotations

import argparse
import os
import sys


def positive(text: str) -> int:
    """Return a positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return _countable(text)


def zero_or_more(text: str) -> int:
    """Return a whole number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return _countable(text)


def processes(text: str) -> int:
    """Return a number of processes; more than four per core and 1024 is taken for a typing error."""
    number, most = positive(text), max(1024, 4 * cores())
    if number > most:
        raise argparse.ArgumentTypeError(f"{text!r} processes are too many, the limit is {most}")
    return number


def _countable(text: str) -> int:
    if int(text) > sys.maxsize:
        raise argparse.ArgumentTypeError(f"{text!r} is too large, the limit is {sys.maxsize}")
    return int(text)


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add the option `--workers`."""
    parser.add_argument(
        "--workers", type=processes, default=cores(), metavar="N", help="worker processes (default: one per core)"
    )


def cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
