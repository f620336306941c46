"""`piledriver profile SCRIPT|CONFIG|RUN`: where time and memory of a few training steps go, with advice."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from piledriver.cli.options.counts import positive
from piledriver.cli.options.parser import Parser

EXAMPLE = "piledriver profile train.py --steps 3 -o profile"


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "target",
        metavar="SCRIPT|CONFIG|RUN",
        help="a training script, a config of 'piledriver train', or a run folder; on several processes: "
        "piledriver launch --nproc 2 -m piledriver.cli.main profile SCRIPT",
    )
    parser.add_argument("--steps", type=positive, default=3, metavar="N", help="optimizer steps to profile (default 3)")
    parser.add_argument(
        "--warm-up", type=positive, default=5, metavar="N", help="steps before, timed without the profiler (default 5)"
    )
    parser.add_argument(
        "-o", "--out", default="profile", metavar="DIR", help="folder of report and traces (default profile)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_overrides("changes of the config; for a script, its arguments (its own options after --)")


def run(args: argparse.Namespace) -> int:
    """Run the target until enough steps are profiled; print the report."""
    import json
    import os

    from piledriver.core.errors import UsageError

    if not os.path.exists(args.target):
        raise UsageError(f"{args.target} does not exist", fix="give a script, a config or a run folder")
    from piledriver.accelerator.accelerator import Accelerator
    from piledriver.accelerator.profiling import LoopProfiler, accelerator_regions
    from piledriver.runtime.world import current_world

    is_training = os.path.isdir(args.target) or args.target.endswith((".yaml", ".yml"))
    if is_training:
        _config_file(args.target)  # before anything is written
    functions = [*accelerator_regions(Accelerator), *(_training_regions() if is_training else ())]
    title = f"profile of {os.path.basename(os.path.normpath(args.target))}"
    profiler = LoopProfiler(steps=args.steps, warm_up=args.warm_up, folder=args.out, title=title, functions=functions)
    with profiler:
        if is_training:
            _train(args.target, args.overrides, steps=args.warm_up + args.steps)
        else:
            _run_script(args.target, args.overrides)
    if profiler.report is None:
        raise UsageError(
            f"{args.target} ended before step {args.warm_up + 1}",
            fix="use a smaller --warm-up, or a script that takes more optimizer steps",
        )
    if current_world().is_main:
        print(json.dumps(profiler.report.to_json(), indent=1) if args.json else profiler.report.text())
        if not args.json:
            print(f"\n{os.path.join(args.out, 'report.html')} shows this with a flame view and a timeline")
    return 0


def _run_script(script: str, arguments: Sequence[str]) -> None:
    """Run a script in this process as `python script arguments` would."""
    import os
    import runpy
    import sys

    before = sys.argv, list(sys.path)
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before


def _config_file(target: str) -> str:
    """Return the config to train from: the target itself, or that of a run folder."""
    import os

    from piledriver.core.errors import UsageError
    from piledriver.train.resume import CONFIG

    if not os.path.isdir(target):
        return target
    path = os.path.join(target, CONFIG)
    if not os.path.exists(path):
        is_model = os.path.exists(os.path.join(target, "config.json"))
        raise UsageError(
            f"{target} is {'a model folder' if is_model else 'not a run folder'}: it holds no {CONFIG}",
            fix=f"give a config with model: {target}" if is_model else "give a script, a config or a run folder",
        )
    return path


def _train(target: str, overrides: Sequence[str], *, steps: int) -> None:
    """Train from a config, or from that of a run, into a folder that is thrown away, for at least so many steps."""
    import os
    import tempfile
    from dataclasses import replace

    from piledriver.core.config import load_config
    from piledriver.train.config import TrainConfig
    from piledriver.train.loop import Trainer
    from piledriver.train.text import TOKENS

    with tempfile.TemporaryDirectory() as out:
        config = load_config(TrainConfig, _config_file(target), list(overrides))
        # The profiler ends the run. A budget of minutes would be converted to steps first, which takes a while.
        shards = os.path.join(target, TOKENS)
        if config.data.corpus is not None and os.path.isdir(shards):  # the run tokenised its corpus already
            config = replace(config, data=replace(config.data, corpus=None, tokenizer=None, tokens=shards))
        budget = max(config.budget_tokens or 0, 2 * steps * config.batch_tokens)
        config = replace(config, budget_tokens=budget, budget_minutes=None)
        Trainer(replace(config, out=os.path.join(out, "run"), plots=False)).run()


def _training_regions() -> list[Any]:
    from piledriver.observe.profile.annotations import Instrumented
    from piledriver.train.position import Position
    from piledriver.train.save import Saving

    return [Instrumented(Position, "next_batch", "loader"), Instrumented(Saving, "save", "checkpoint")]
