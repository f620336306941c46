"""Arguments that the verbs of `piledriver compress` share: a config, changes of its keys, JSON output."""

from __future__ import annotations

from piledriver.cli.options.parser import Parser


def configure(parser: Parser) -> None:
    """Add the arguments of a verb that reads a config."""
    parser.add_argument(
        "config", nargs="?", help="YAML config; optional if key=value gives every required key (--keys lists them)"
    )
    parser.add_overrides("change keys of the config, such as out=small", optional_file="config")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
