"""`accelerate.commands.launch`: Accelerate's launch parser over `piledriver.runtime.launch`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from piledriver.runtime.launch.accelerate_flags import add_accelerate_flags, given_accelerate_flags
from piledriver.runtime.launch.agent import launch
from piledriver.runtime.launch.config import resolve_launch_config

_SAME = ("cpu", "mixed_precision", "gradient_accumulation_steps", "max_restarts", "log_dir")


def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """Return a parser of `accelerate launch`'s command line."""
    description = "Launch a script on several processes (piledriver in place of Accelerate)"
    parser: argparse.ArgumentParser
    if subparsers is not None:
        parser = subparsers.add_parser("launch", description=description, allow_abbrev=False)
    else:
        parser = argparse.ArgumentParser("accelerate launch", description=description, allow_abbrev=False)
    parser.add_argument("--config_file", "--config-file")
    for name in _SAME:
        kind: dict[str, Any] = {"action": "store_true"} if name == "cpu" else {}
        if name in ("gradient_accumulation_steps", "max_restarts"):
            kind = {"type": int}
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, dest=name, default=argparse.SUPPRESS, **kind)
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("--debug", action="store_true")
    add_accelerate_flags(parser)
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    if subparsers is not None:
        parser.set_defaults(func=launch_command)
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Start the script of a parsed command line, with `import accelerate` aliased."""
    own: dict[str, Any] = {name: value for name, value in vars(args).items() if name in _SAME}
    own |= {"debug_collectives": True} if args.debug else {}
    wanted, _ = resolve_launch_config(args.config_file, own, given_accelerate_flags(args))
    launch(replace(wanted, alias_accelerate=True), args.training_script, args.training_script_args, module=args.module)


def main() -> None:
    """Run `accelerate launch`."""
    launch_command(launch_command_parser().parse_args())


if __name__ == "__main__":
    main()
