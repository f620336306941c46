"""`piledriver train CONFIG.yaml [key=value ...]`: pretrain a model; run it again to go on after an interruption."""

from __future__ import annotations

import argparse

from piledriver.cli.counts import positive
from piledriver.cli.overrides import add_overrides


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("config", nargs="?", help="a YAML file, see docs/train.md; key=value alone will do too")
    add_overrides(parser, "change keys of the config", optional_file="config")
    parser.add_argument(
        "--validation",
        metavar="CORPUS",
        help="text shards for bits per byte as training goes on (default: the corpus's)",
    )
    parser.add_argument(
        "--validation-documents", type=positive, default=100, metavar="N", help="how many of them (default 100)"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Train, print how it ended; exit code 75 says: asked to stop, run again to go on."""
    import json
    import math
    from dataclasses import asdict

    from piledriver.core.config import load_config, to_yaml
    from piledriver.train import TrainConfig
    from piledriver.train.loop import Run
    from piledriver.train.stopping import STOPPED_EXIT_CODE
    from piledriver.train.text import split_of, tokens_folder

    config = load_config(TrainConfig, args.config, args.overrides)
    held_out = args.validation or (split_of(config.data.corpus, "validation") if config.data.corpus else None)
    validate = None
    if held_out:
        from piledriver.evaluate.validation import validation

        validate = validation(held_out, tokens_folder(config), documents=args.validation_documents)
    made = Run(config, validate)  # what is wrong with the config shows here, before anything is printed or written
    is_main = made.world.is_main
    if is_main and not args.json:
        print(to_yaml(config), flush=True)
    summary = made.go()
    if is_main and args.json:
        figures = {**asdict(summary), "loss": summary.loss if math.isfinite(summary.loss) else None}
        print(json.dumps(figures, indent=2))
    elif is_main:
        done = "finished" if summary.finished else "stopped; run the same command to go on"
        left_out = f", {summary.skipped_batches} batches left out" if summary.skipped_batches else ""
        print(
            f"{summary.out}: {summary.steps} steps, {summary.tokens} tokens, loss {summary.loss:.4f}{left_out}, {done}"
        )
    return 0 if summary.finished else STOPPED_EXIT_CODE
