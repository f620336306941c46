"""`piledriver train CONFIG.yaml [key=value ...]`: pretrain a model; run it again to go on after an interruption."""

from __future__ import annotations

import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("config", help="a YAML file; see docs/train.md")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change keys of the config")
    parser.add_argument("--validation", metavar="CORPUS", help="text shards for bits per byte as training goes on")
    parser.add_argument(
        "--validation-documents", type=int, default=100, metavar="N", help="how many of them (default 100)"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def run(args: argparse.Namespace) -> int:
    """Train, print how it ended; exit code 75 says: asked to stop, run again to go on."""
    import json
    from dataclasses import asdict

    from piledriver.core.config import load_config, to_yaml
    from piledriver.train import TrainConfig, train
    from piledriver.train.stopping import STOPPED_EXIT_CODE

    config = load_config(TrainConfig, args.config, args.overrides)
    validate = None
    if args.validation:
        from piledriver.evaluate.validation import validation

        validate = validation(args.validation, config.data.tokens, documents=args.validation_documents)
    if not args.json:
        print(to_yaml(config))
    summary = train(config, validate=validate)
    if args.json:
        print(json.dumps(asdict(summary), indent=2))
    else:
        done = "finished" if summary.finished else "stopped; run the same command to go on"
        print(f"{summary.out}: {summary.steps} steps, {summary.tokens} tokens, loss {summary.loss:.4f}, {done}")
    return 0 if summary.finished else STOPPED_EXIT_CODE
