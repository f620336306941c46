"""`piledriver test`: check the set-up end to end on all processes that `piledriver launch` would start."""

from __future__ import annotations

import argparse

from piledriver.cli.launch import add_flags, chosen_flags


def configure(parser: argparse.ArgumentParser) -> None:
    """The flags of `piledriver launch`."""
    parser.add_argument("--config", metavar="FILE", help="launch config (default: the one `piledriver config` wrote)")
    add_flags(parser)


def run(args: argparse.Namespace) -> None:
    """Launch the checks."""
    from piledriver.runtime.launch.agent import launch
    from piledriver.runtime.launch.config import resolve

    wanted, _ = resolve(args.config, chosen_flags(args))
    launch(wanted, "piledriver.runtime.check", module=True)
    print("piledriver test: all is well")
