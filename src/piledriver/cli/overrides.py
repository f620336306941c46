"""`key=value` behind a file, before, between or after the options of a verb."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def add_overrides(parser: argparse.ArgumentParser, help: str) -> None:
    """The arguments `key=value`, as many as the user likes, wherever they stand.

    >>> parser = argparse.ArgumentParser()
    >>> _ = parser.add_argument("file"), parser.add_argument("--json", action="store_true")
    >>> add_overrides(parser, "change keys")
    >>> parser.parse_args(["a.yaml", "lr=1", "--json", "seed=2"]).overrides
    ['lr=1', 'seed=2']
    """
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help)
    plain: Any = parser.parse_known_args

    def parse(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        # argparse takes a list of positional arguments in one piece, unless it is told that they may be apart; the
        # parser above this one cannot tell it.
        vars(parser)["parse_known_args"] = plain
        try:
            return parser.parse_known_intermixed_args(args, namespace)
        finally:
            vars(parser)["parse_known_args"] = parse

    vars(parser)["parse_known_args"] = parse
