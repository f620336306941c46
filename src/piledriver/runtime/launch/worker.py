"""Entry point of a launched process: bind to cores, alias modules, then run the user's script as `__main__`.

An exception is recorded for the agent before it propagates, so that the launcher can report the rank and the cause.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType


def quiet_when_interrupted(kind: type[BaseException], error: BaseException, traceback: TracebackType | None, /) -> None:
    """Print no traceback on Ctrl-C: the launcher reports it once for all processes."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)


def run_recorded() -> None:
    """Run `main` and record its exception for the launcher."""
    # Imported here, because an interrupt during torch's import must be quiet as well.
    from torch.distributed.elastic.multiprocessing.errors import record

    record(main)()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script named on the command line."""
    parser = argparse.ArgumentParser(prog="piledriver.runtime.launch.worker", allow_abbrev=False)
    parser.add_argument("--alias-accelerate", action="store_true")
    parser.add_argument("--bind-numa", action="store_true")
    parser.add_argument("-m", dest="module", action="store_true")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    if args.bind_numa:
        from piledriver.runtime.launch.numa import bind_to_near_cores

        bind_to_near_cores()
    if args.alias_accelerate:
        from piledriver.runtime.launch.alias import install_alias

        install_alias("accelerate", "piledriver.compat.accelerate")
    sys.argv = [args.script, *args.arguments]
    if args.module:
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(args.script, run_name="__main__", alter_sys=True)
        return
    # As `python script.py` does: modules beside the script are found first.
    sys.path[0] = str(Path(args.script).resolve().parent)
    runpy.run_path(args.script, run_name="__main__")


if __name__ == "__main__":
    sys.excepthook = quiet_when_interrupted
    run_recorded()
