"""`piledriver config`: write the config of `piledriver launch`, by questions or, with `--default`, without."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from piledriver.cli.launch import add_flags, chosen_flags
from piledriver.core.errors import MissingFileError, UsageError

EXAMPLE = "piledriver config --default --nproc 8"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments; a flag replaces its question."""
    parser.add_argument("--default", action="store_true", help="do not ask: use the detected values and the flags")
    parser.add_argument("--file", metavar="FILE", help="file to write (default: where 'piledriver launch' looks)")
    parser.add_argument("--show", action="store_true", help="print the current config and exit")
    add_flags(parser)


def run(args: argparse.Namespace) -> None:
    """Ask, write the file, and print it."""
    from piledriver.core import config, storage
    from piledriver.runtime.hardware import find_hardware
    from piledriver.runtime.launch.config import LaunchConfig, default_path, processes_per_node

    path = args.file or str(default_path())
    if args.show:
        if args.file is None and not storage.exists(path):
            raise MissingFileError(f"launch config {path}", fix="'piledriver config' writes it")
        print(storage.read_text(path), end="")
        return
    answers: dict[str, Any] = chosen_flags(args)
    if not args.default:
        hardware = find_hardware()
        count, why = processes_per_node(LaunchConfig(), hardware)
        print(f"This node has {hardware.count(hardware.best())} {hardware.best()} device(s) or cores.")
        try:
            answers = {**_ask(count, why, answers, input), **answers}
        except EOFError:
            raise UsageError(
                "standard input ended before the last answer", fix="'piledriver config --default' asks nothing"
            ) from None
    wanted = LaunchConfig(**answers)
    storage.write_text(path, config.to_yaml(wanted))
    print(f"wrote {path}:")
    print(config.to_yaml(wanted), end="")


def _ask(count: int, why: str, known: dict[str, Any], read: Callable[[str], str]) -> dict[str, Any]:
    """Ask the questions in order and return the answers; an empty answer takes the default."""
    answers: dict[str, Any] = {}

    def ask(name: str, question: str, default: Any, parse: Callable[[str], Any] = str) -> Any:
        if name in known:
            return known[name]
        while True:
            text = read(f"{question} [{default}]: ").strip()
            try:
                answers[name] = parse(text) if text else default
                return answers[name]
            except ValueError:
                print(f"  {text!r} is not a valid answer")

    nodes = ask("nnodes", "How many nodes?", "1")
    if nodes != "1":
        ask("node_rank", "Rank of this node, from 0?", 0, int)
        ask("rdzv_endpoint", "Rendezvous endpoint (HOST:PORT of the first node)?", "localhost:29400")
    ask("nproc", f"Processes per node? ({why})", "auto" if count > 1 else count, _count)
    ask("cpu", "Use the CPU even if there is an accelerator? (yes/no)", False, _yes)
    ask("mixed_precision", "Mixed precision? (no, fp16, bf16, fp8)", "no", _one_of("no", "fp16", "bf16", "fp8"))
    ask("max_restarts", "Restarts after a failure?", 0, int)
    return answers


def _count(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _yes(text: str) -> bool:
    if text.lower() not in ("y", "yes", "n", "no", "true", "false"):
        raise ValueError(text)
    return text.lower() in ("y", "yes", "true")


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return parse
