"""`piledriver trace`: which documents a step saw, and which steps saw a document."""

from __future__ import annotations

import argparse
import json

from piledriver.cli.counts import positive, zero_or_more


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="the folder of a run")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--step",
        type=positive,
        metavar="N",
        help="the documents of this step, counted from 1 as in metrics.jsonl; of one still to come, those it would see",
    )
    asked.add_argument("--document", metavar="ID", help="the steps that saw this document")
    parser.add_argument("--until", type=zero_or_more, metavar="N", help="with --document: look at the first N steps")
    parser.add_argument(
        "--tokens",
        metavar="TOKENS",
        help="the token shards, where they have moved (default: as the run noted them, or below RUN)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array")


def run(args: argparse.Namespace) -> None:
    """Trace, and print a line per part of a document."""
    from dataclasses import replace

    from piledriver.core.errors import UsageError
    from piledriver.data.trace import trace_document, trace_step

    if args.step is not None:
        found = trace_step(args.run, args.step - 1, args.tokens)
    elif args.until is None:
        raise UsageError("--document needs --until", fix="give the number of steps that the run has taken")
    else:
        found = trace_document(args.run, args.document, until=args.until, tokens=args.tokens)
    # The record counts from 0, what a user reads (metrics, progress, checkpoints) from 1.
    found = [replace(sighting, step=sighting.step + 1) for sighting in found]
    if args.json:
        print(json.dumps([sighting.as_dict() for sighting in found], ensure_ascii=False))
        return
    for sighting in found:
        place = f"bytes {sighting.bytes[0]}-{sighting.bytes[1]}" if sighting.bytes else "bytes unknown"
        print(
            f"step {sighting.step}  window {sighting.window}  {sighting.document}  {sighting.source}  "
            f"{sighting.licence or '-'}  {sighting.origin or '-'}  "
            f"tokens {sighting.tokens[0]}-{sighting.tokens[1]}  {place}"
        )
    print(f"{len({sighting.document for sighting in found})} documents, {len(found)} parts")
