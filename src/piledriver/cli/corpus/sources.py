"""`piledriver corpus sources`: list the sources with raw format, licence and consent."""

from __future__ import annotations

import argparse
import json
import sys

EXAMPLE = "piledriver corpus sources arxiv"
_UNWRAPPED = 10_000
_SHOWN = ("slug", "name", "title", "raw_format", "licence", "consent", "treatment", "citation")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "source", metavar="SOURCE", nargs="?", help="show one source in full (default: a table of all sources)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: argparse.Namespace) -> None:
    """Print a table of all sources, or everything about one."""
    from piledriver.corpus.sources import SOURCES, resolve

    sources = [resolve(args.source)] if args.source else [SOURCES[slug] for slug in SOURCES]
    cards = [{key: getattr(source, key) for key in _SHOWN} for source in sources]
    if args.json:
        print(json.dumps(cards, indent=2, ensure_ascii=False))
    elif args.source:
        width = max(map(len, _SHOWN))
        for key in _SHOWN:
            if cards[0][key]:
                print(f"{key.replace('_', ' '):<{width}}  {cards[0][key]}")
    else:
        _print_table(cards)


def _print_table(cards: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("source", "reads", "licence", "consent"):
        table.add_column(column, overflow="fold")
    for card in cards:
        table.add_row(card["slug"], card["raw_format"], card["licence"], card["consent"])
    # A pipe has no width: one line per source there.
    console = Console(width=None if sys.stdout.isatty() else _UNWRAPPED)
    with console.capture() as shown:
        console.print(table)
    # Not printed by rich, which exits with an error when the reader of a pipe closes it.
    print("\n".join(line.rstrip() for line in shown.get().splitlines()))
