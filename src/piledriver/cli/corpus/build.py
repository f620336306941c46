"""`piledriver corpus build RECIPE -o DIR`: build a corpus from a recipe; run it again to resume."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from piledriver.cli.options.counts import add_workers
from piledriver.cli.options.parser import Parser

EXAMPLE = "piledriver corpus build recipe.yaml -o corpus seed=7 --workers 8"
KEYS = "piledriver.corpus.pipeline.recipe:Recipe"


def configure(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("recipe", metavar="RECIPE", help="YAML file, or a recipe of the package: local, open or pile")
    parser.add_overrides("change keys of the recipe, such as seed=7")
    parser.add_argument("-o", "--out", required=True, metavar="DIR", help="corpus folder to write, or to resume")
    parser.add_argument(
        "--executor",
        default="local",
        metavar="local|ray|ray:HOST:PORT",
        help="what runs the tasks: local processes (default), a new local Ray, or a running Ray cluster",
    )
    add_workers(parser)
    parser.add_argument(
        "--keep-work",
        action="store_true",
        help="keep the intermediate files, so that a build with a changed recipe runs only what changed",
    )
    parser.add_argument("--json", action="store_true", help="print the manifest as JSON")


def run(args: argparse.Namespace) -> None:
    """Build, and print what each stage kept and dropped."""
    from piledriver.corpus.pipeline.build import build_corpus, missing_inputs
    from piledriver.corpus.pipeline.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.overrides)
    for path, missing in missing_inputs(recipe):
        where = f" ({missing.citation})" if missing.citation else ""
        print(f"missing: {path}: {missing.title}: {missing.raw_format}{where}", file=sys.stderr)
    manifest = build_corpus(
        recipe, args.out, executor_name=args.executor, workers=args.workers, keep_work=args.keep_work
    )
    if args.json:
        print(json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False))
        return
    for stage in manifest.stages:
        for source, account in stage["sources"].items():
            dropped = ", ".join(f"{count} {reason}" for reason, count in account["dropped"].items())
            print(
                f"{stage['stage']:<13} {source:<20} {account['documents']:>9} documents"
                + (f"  dropped: {dropped}" if dropped else "")
            )
    for source, share in manifest.mix.items():
        unit = "tokens" if "asked_tokens" in share else "bytes"
        got, asked = share[f"got_{unit}"], share[f"asked_{unit}"]
        print(f"{'mix':<13} {source:<20} {got:>9} {unit} of {asked:.0f} requested")
        if not got:
            print(
                f"warning: the corpus has no document of {source}; the stages above show what dropped them",
                file=sys.stderr,
            )
    for split in ("train", "validation", "test"):
        shards = [entry for entry in manifest.outputs if entry.get("split") == split]
        print(f"{split}: {sum(entry['documents'] for entry in shards)} documents in {len(shards)} shards")
