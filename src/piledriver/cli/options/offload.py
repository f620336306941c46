"""Arguments of verbs that serve models larger than the device: `--offload` and the memory it may use."""

from __future__ import annotations

import argparse


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Add the options that limit where weights may be."""
    parser.add_argument(
        "--memory", metavar="SIZE", help="most host memory for weights, as 8GiB (default: all that is free)"
    )
    parser.add_argument("--device-memory", metavar="SIZE", help="most memory of each GPU (default: what is free)")
    parser.add_argument(
        "--scratch", metavar="DIR", help="where a quantised model is packed while it runs (default: its own folder)"
    )


def add_offload(parser: argparse.ArgumentParser) -> None:
    """Add `--offload` and its limits."""
    parser.add_argument(
        "--offload",
        action="store_true",
        help="weights that do not fit on the device stay in host memory and on disk, as in `piledriver run`",
    )
    add_memory(parser)


def check_offload(args: argparse.Namespace, **incompatible: bool) -> None:
    """Raise `UsageError` for options that do not go together.

    `incompatible` maps options of the verb, with `_` for `-`, to whether they are given.
    """
    from piledriver.core.errors import UsageError

    if not args.offload and (args.memory or args.device_memory):
        given = "--memory" if args.memory else "--device-memory"
        raise UsageError(f"{given} limits offloaded weights", fix="add --offload")
    for name, is_given in incompatible.items():
        if args.offload and is_given:
            raise UsageError(f"--{name.replace('_', '-')} and --offload do not go together", fix="leave out one")
