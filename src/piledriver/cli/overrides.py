"""`key=value` behind a file, before, between or after the options of a verb; or in place of the file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any


def add_overrides(parser: argparse.ArgumentParser, help: str, *, optional_file: str | None = None) -> None:
    """The arguments `key=value`, as many as the user likes, wherever they stand.

    `optional_file` names an argument before them that may be left out: what stands in its place and has a `=` is the
    first override, unless there is a file of that name.

    >>> parser = argparse.ArgumentParser()
    >>> _ = parser.add_argument("file", nargs="?"), parser.add_argument("--json", action="store_true")
    >>> add_overrides(parser, "change keys", optional_file="file")
    >>> given = parser.parse_args(["a.yaml", "lr=1", "--json", "seed=2"])
    >>> given.file, given.overrides
    ('a.yaml', ['lr=1', 'seed=2'])
    >>> parser.parse_args(["lr=1", "--json", "seed=2"]).overrides
    ['lr=1', 'seed=2']
    """
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help)
    plain: Any = parser.parse_known_args

    def parse(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        # argparse takes a list of positional arguments in one piece, unless it is told that they may be apart; the
        # parser above this one cannot tell it.
        vars(parser)["parse_known_args"] = plain
        try:
            found, unknown = parser.parse_known_intermixed_args(args, namespace)
        finally:
            vars(parser)["parse_known_args"] = parse
        first = getattr(found, optional_file) if optional_file is not None else None
        if optional_file is not None and first is not None and "=" in first and not os.path.exists(first):
            setattr(found, optional_file, None)
            found.overrides = [first, *found.overrides]
        return found, unknown

    vars(parser)["parse_known_args"] = parse
