"""`piledriver launch SCRIPT`: start a script on all processes of one or more nodes.

The flags and the config file of `accelerate launch` are accepted too (`runtime/launch/accelerate_flags.py`).
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from typing import Any

from piledriver.cli.options.counts import processes
from piledriver.core.errors import UsageError
from piledriver.runtime.launch.accelerate_flags import add_accelerate_flags, given_accelerate_flags

EXAMPLE = "piledriver launch --nproc 8 train.py --epochs 3"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments; omitted ones come from the config file, then from the defaults."""
    add_flags(parser)
    add_accelerate_flags(parser)
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="launch config, also one of Accelerate's (default: that of 'piledriver config')",
    )
    for spelled in ("--config_file", "--config-file"):
        parser.add_argument(spelled, dest="config", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and exit")
    parser.add_argument("--slurm", action="store_true", help="print a Slurm batch script for this command and exit")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module name, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="script to run; not needed with --print-config")
    parser.add_argument("script_args", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field of `LaunchConfig`, also with `_` for `-`; one that is not given sets no attribute."""

    def add(name: str, **options: object) -> None:
        parser.add_argument(name, default=argparse.SUPPRESS, **options)  # type: ignore[arg-type]
        other = "--" + name.removeprefix("--").replace("-", "_")
        if other != name:
            hidden: Any = {**options, "help": argparse.SUPPRESS}
            parser.add_argument(other, default=argparse.SUPPRESS, **hidden)

    add("--nproc", type=_count, metavar="N|auto", help="processes per node (default auto: one per accelerator)")
    add("--nnodes", metavar="N|MIN:MAX", help="nodes (default 1)")
    add("--node-rank", type=int, metavar="R", help="rank of this node, from 0 (default: by order of arrival)")
    add("--rdzv-endpoint", type=_endpoint, metavar="HOST:PORT", help="rendezvous endpoint; required for several nodes")
    add("--rdzv-id", metavar="NAME", help="job name at the endpoint (default piledriver)")
    add("--rdzv-timeout-seconds", type=_seconds, metavar="S", help="seconds to wait for all nodes (default 300)")
    add("--max-restarts", type=int, metavar="N", help="restarts after a failure (default 0)")
    add("--cpu", action=argparse.BooleanOptionalAction, help="use the CPU even if there is an accelerator (default no)")
    add(
        "--bind-numa",
        action=argparse.BooleanOptionalAction,
        help="bind each process to the cores of its device's NUMA node (default no)",
    )
    add("--log-dir", type=_folder, metavar="DIR", help="one log file per process (default: print to the terminal)")
    add(
        "--mixed-precision",
        choices=["no", "fp16", "bf16", "fp8"],
        help="mixed precision of an Accelerator() that sets none",
    )
    add(
        "--gradient-accumulation-steps",
        type=int,
        metavar="N",
        help="accumulation steps of an Accelerator() that sets none",
    )
    add(
        "--debug-collectives",
        action=argparse.BooleanOptionalAction,
        help="check that all ranks call each collective alike before it runs (default no)",
    )
    add(
        "--alias-accelerate",
        action=argparse.BooleanOptionalAction,
        help="make 'import accelerate' import piledriver.compat.accelerate (default no)",
    )
    add(
        "--env",
        action="append",
        type=_variable,
        metavar="NAME=VALUE",
        help="environment variable of the processes; may be repeated",
    )


def run(args: argparse.Namespace) -> None:
    """Resolve the config, and start the processes."""
    from piledriver.core import config
    from piledriver.runtime.hardware import find_hardware
    from piledriver.runtime.launch.agent import launch
    from piledriver.runtime.launch.config import processes_per_node, resolve_launch_config
    from piledriver.runtime.launch.slurm import ENDPOINT, slurm_script

    flags = chosen_flags(args)
    if args.slurm:
        # The first node of the allocation, which Slurm chooses, is the endpoint.
        flags.setdefault("rdzv_endpoint", ENDPOINT)
    wanted, source = resolve_launch_config(args.config, flags, given_accelerate_flags(args))
    if args.print_config:
        print(f"# from {source}, then flags")
        print(config.to_yaml(wanted), end="")
        return
    if args.script is None:
        raise UsageError("no script is given", fix="piledriver launch train.py")
    if args.slurm:
        nodes = wanted.node_range()[1]
        print(slurm_script(wanted, args.script, args.script_args, nodes=nodes, module=args.module), end="")
        return
    count, why = processes_per_node(wanted, find_hardware())
    if args.module or os.path.isfile(args.script):
        print(f"launching {count} process(es) on this node ({why}); config from {source}", file=sys.stderr)
    launch(wanted, args.script, args.script_args, module=args.module)


def chosen_flags(args: argparse.Namespace) -> dict[str, object]:
    """Return the fields of `LaunchConfig` that were given on the command line."""
    import dataclasses

    from piledriver.runtime.launch.config import LaunchConfig

    names = {field.name for field in dataclasses.fields(LaunchConfig)}
    flags = {name: value for name, value in vars(args).items() if name in names}
    return flags | ({"env": dict(flags["env"])} if "env" in flags else {})


def _count(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto")
    return processes(text) if int(text) else 0  # which LaunchConfig rejects with the reason


def _variable(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not given or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def _endpoint(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT, with a port from 1 to 65535")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def _folder(text: str) -> str:
    if os.path.exists(text) and not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text!r} is a file, not a folder")
    return text
