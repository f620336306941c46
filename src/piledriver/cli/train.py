"""`piledriver train CONFIG.yaml [key=value ...]`: pretrain a model; run it again to resume."""

from __future__ import annotations

import argparse

from piledriver.cli.options.counts import positive
from piledriver.cli.options.parser import Parser

EXAMPLE = "piledriver train train.yaml out=run optimizer.lr=1e-3"
KEYS = "piledriver.train.config:TrainConfig"


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "config",
        nargs="?",
        help="YAML config; optional if key=value gives every required key (--keys lists them)",
    )
    parser.add_overrides("change keys of the config, such as optimizer.lr=1e-3", optional_file="config")
    parser.add_argument(
        "--validation",
        metavar="CORPUS",
        help="text shards for bits per byte during training (default: the validation split of data.corpus)",
    )
    parser.add_argument(
        "--validation-documents", type=positive, default=100, metavar="N", help="documents per validation (default 100)"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Train, and print a summary. Return 75 if the run was asked to stop and can be resumed."""
    import json
    import math
    from dataclasses import asdict

    from piledriver.core.config import load_config, to_yaml
    from piledriver.models.presets import preset
    from piledriver.train.config import TrainConfig

    config = load_config(TrainConfig, args.config, args.overrides)
    if isinstance(config.model, str) and config.model_folder is None:
        preset(config.model)
    # Only now what imports torch: a wrong config is reported at once.
    from piledriver.train.loop import Trainer
    from piledriver.train.stopping import STOPPED_EXIT_CODE
    from piledriver.train.text import split_of, tokens_folder

    held_out = args.validation or (split_of(config.data.corpus, "validation") if config.data.corpus else None)
    validate = sample = None
    if held_out:
        from piledriver.evaluate.text_samples import sampler
        from piledriver.evaluate.validation import validation

        validate = validation(held_out, tokens_folder(config), documents=args.validation_documents)
        sample = sampler(held_out, tokens_folder(config))
    made = Trainer(config, validate, sample=sample)  # checks the config before anything is printed or written
    is_main = made.world.is_main
    if is_main and not args.json:
        print(to_yaml(made.resolved), flush=True)
    summary = made.run()
    if is_main and args.json:
        figures = {**asdict(summary), "loss": summary.loss if math.isfinite(summary.loss) else None}
        print(json.dumps(figures, indent=2))
    elif is_main:
        done = "finished" if summary.finished else "stopped; run the same command to resume"
        skipped = f", {summary.skipped_batches} batches skipped" if summary.skipped_batches else ""
        print(
            f"{summary.out}: {summary.steps} steps, {summary.tokens} tokens, loss {summary.loss:.4f}{skipped}, {done}"
        )
    return 0 if summary.finished else STOPPED_EXIT_CODE
