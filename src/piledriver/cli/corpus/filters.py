"""`piledriver corpus filters`: the filters and whole-corpus stages that a recipe's `use` can name."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from typing import Any

EXAMPLE = "piledriver corpus filters length"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="show only this filter or stage")
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: argparse.Namespace) -> None:
    """Print each filter and stage with its settings."""
    from piledriver.cli.options.keys import keys_text
    from piledriver.core.errors import UnknownNameError

    entries = list_stages()
    if args.name is not None and args.name not in [entry["name"] for entry in entries]:
        raise UnknownNameError("filter or stage", args.name, [entry["name"] for entry in entries])
    entries = [entry for entry in entries if args.name in (None, entry["name"])]
    if args.json:
        shown = [entry | {"settings": [dataclasses.asdict(key) for key in entry["settings"]]} for entry in entries]
        print(json.dumps(shown, indent=2, ensure_ascii=False))
        return
    for entry in entries:
        print(f"{entry['name']} ({entry['kind']}): {entry['help']}")
        if entry["settings"]:
            print(keys_text(entry["settings"], indent="    "))


def list_stages() -> list[dict[str, Any]]:
    """Return name, kind, help and settings of every filter and whole-corpus stage."""
    from piledriver.core.config.keys import config_keys
    from piledriver.corpus.filters import FILTERS
    from piledriver.corpus.pipeline.stage_registry import STAGES

    known: list[tuple[str, str, type]] = [(name, "filter", FILTERS[name]) for name in FILTERS]
    known += [(name, "whole corpus", STAGES[name]) for name in STAGES]
    return [
        {"name": name, "kind": kind, "help": _summary(cls), "settings": config_keys(cls)} for name, kind, cls in known
    ]


def _summary(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())
