"""`piledriver launch SCRIPT`: start a script on the processes of this node, and of others."""

from __future__ import annotations

import argparse
import math
import os
import sys

from piledriver.cli.counts import processes
from piledriver.core.errors import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments; what is not given comes from the config file, then from defaults."""
    add_flags(parser)
    parser.add_argument("--config", metavar="FILE", help="launch config (default: the one `piledriver config` wrote)")
    parser.add_argument("--print-config", action="store_true", help="print the resolved config and stop")
    parser.add_argument("--slurm", action="store_true", help="print a Slurm batch script for this command and stop")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module name, as in python -m")
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="the script to run; not needed for --print-config")
    parser.add_argument("script_args", metavar="ARGS", nargs=argparse.REMAINDER, help="its own arguments")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field of the launch config; absent flags leave no trace."""

    def add(*names: str, **options: object) -> None:
        parser.add_argument(*names, default=argparse.SUPPRESS, **options)  # type: ignore[arg-type]

    add("--nproc", type=_count, metavar="N|auto", help="processes per node (default auto: one per accelerator)")
    add("--nnodes", metavar="N|MIN:MAX", help="nodes (default 1)")
    add("--node-rank", type=int, metavar="R", help="this node among all, from 0 (default: as they come)")
    add("--rdzv-endpoint", type=_endpoint, metavar="HOST:PORT", help="where the nodes meet; needed for more than one")
    add("--rdzv-id", metavar="NAME", help="name of the job at that endpoint (default piledriver)")
    add("--rdzv-timeout-seconds", type=_seconds, metavar="S", help="how long nodes wait for each other (default 300)")
    add("--max-restarts", type=int, metavar="N", help="how often to start again after a failure (default 0)")
    add("--cpu", action=argparse.BooleanOptionalAction, help="compute on the CPU even with an accelerator (default no)")
    add(
        "--bind-numa",
        action=argparse.BooleanOptionalAction,
        help="keep each process on the cores near its device (default no)",
    )
    add("--log-dir", type=_folder, metavar="DIR", help="one log file per process (default: all to the terminal)")
    add(
        "--mixed-precision",
        choices=["no", "fp16", "bf16", "fp8"],
        help="precision of an Accelerator that names none (default: its own)",
    )
    add(
        "--gradient-accumulation-steps",
        type=int,
        metavar="N",
        help="micro-batches per step of an Accelerator that names none (default: its own)",
    )
    add(
        "--debug-collectives",
        action=argparse.BooleanOptionalAction,
        help="check every collective before it runs (default no)",
    )
    add(
        "--alias-accelerate",
        action=argparse.BooleanOptionalAction,
        help="'import accelerate' gives piledriver's (default no)",
    )


def run(args: argparse.Namespace) -> None:
    """Resolve the config and start."""
    from piledriver.core import config
    from piledriver.runtime.hardware import find_hardware
    from piledriver.runtime.launch.agent import launch
    from piledriver.runtime.launch.config import processes_per_node, resolve
    from piledriver.runtime.launch.slurm import ENDPOINT, slurm_script

    flags = chosen_flags(args)
    if args.slurm:
        # The nodes of a batch script meet at the first of them, whoever that will be.
        flags.setdefault("rdzv_endpoint", ENDPOINT)
    wanted, source = resolve(args.config, flags)
    if args.print_config:
        print(f"# from {source}, then flags")
        print(config.to_yaml(wanted), end="")
        return
    if args.script is None:
        raise UsageError("there is no script to run", fix="piledriver launch train.py")
    if args.slurm:
        nodes = wanted.node_range()[1]
        print(slurm_script(wanted, args.script, args.script_args, nodes=nodes, module=args.module), end="")
        return
    count, why = processes_per_node(wanted, find_hardware())
    if args.module or os.path.isfile(args.script):  # what cannot be launched is only refused
        print(f"launching {count} process(es) on this node ({why}); config from {source}", file=sys.stderr)
    launch(wanted, args.script, args.script_args, module=args.module)


def chosen_flags(args: argparse.Namespace) -> dict[str, object]:
    """The launch config's fields that were given on the command line."""
    import dataclasses

    from piledriver.runtime.launch.config import LaunchConfig

    names = {field.name for field in dataclasses.fields(LaunchConfig)}
    return {name: value for name, value in vars(args).items() if name in names}


def _count(text: str) -> int | str:
    if text == "auto":
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto")
    return processes(text) if int(text) else 0  # which the config refuses with its reason


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
