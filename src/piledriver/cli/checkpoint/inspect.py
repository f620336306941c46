"""`piledriver checkpoint inspect PATH`: print what a checkpoint holds and whether it is complete."""

from __future__ import annotations

import argparse
import json

EXAMPLE = "piledriver checkpoint inspect run/checkpoints --verify"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("path", help="checkpoint, run folder (its latest checkpoint), or folder or file with weights")
    parser.add_argument("--verify", action="store_true", help="re-check the checksum of every file")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> None:
    """Print header, contents and, if requested, tensors."""
    from piledriver.core import storage

    storage.require(args.path)  # before torch is imported
    from piledriver.checkpoint.inspect import inspect

    found = inspect(args.path, check=args.verify)
    tensors = found.pop("tensors")
    if args.json:
        print(json.dumps({**found, "tensors": tensors} if args.tensors else found, indent=2))
        return
    contents = found.pop("contents")
    width = max(map(len, [*found, *contents]))
    for name, value in found.items():
        if value not in (None, {}):
            print(f"{name:<{width}}  {value if not isinstance(value, dict) else json.dumps(value)}")
    for name, value in contents.items():
        print(f"{name:<{width}}  {value}")
    if args.tensors:
        for name, tensor in tensors.items():
            print(f"  {name}  {tensor['dtype']} {tensor['shape']} in {tensor['pieces']} pieces")
