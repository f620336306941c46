"""`piledriver env`: print versions, devices, and what was detected and why."""

from __future__ import annotations

import argparse
import json

EXAMPLE = "piledriver env --json"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Print the facts of this machine by section."""
    from piledriver.runtime.report import describe_machine

    facts = describe_machine()
    if args.json:
        print(json.dumps(facts, indent=2))
        return
    for section, entries in facts.items():
        print(f"{section}:")
        width = max(map(len, entries))
        for name, value in entries.items():
            print(f"  {name:<{width}}  {value}")
