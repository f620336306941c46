"""`piledriver test`: check collectives and devices on the processes that `piledriver launch` starts."""

from __future__ import annotations

import argparse

from piledriver.cli.launch import add_flags, chosen_flags

EXAMPLE = "piledriver test --nproc 2 --cpu"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `piledriver launch`."""
    parser.add_argument(
        "--config", metavar="FILE", help="launch config (default: the one that 'piledriver config' writes)"
    )
    add_flags(parser)


def run(args: argparse.Namespace) -> None:
    """Launch the checks; an error on any rank ends the command."""
    from piledriver.runtime.launch.agent import launch
    from piledriver.runtime.launch.config import resolve_launch_config

    wanted, _ = resolve_launch_config(args.config, chosen_flags(args))
    launch(wanted, "piledriver.runtime.check", module=True)
    print("piledriver test: all checks passed")
