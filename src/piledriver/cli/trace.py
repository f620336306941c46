"""`piledriver trace RUN`: list the documents that a step saw, or the steps that saw a document."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from piledriver.cli.options.counts import positive, zero_or_more

EXAMPLE = "piledriver trace run --step 5"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("run", metavar="RUN", help="run folder")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--step",
        type=positive,
        metavar="N",
        help="documents of step N, counted from 1 as in metrics.jsonl; a future step lists what it would see",
    )
    asked.add_argument("--document", metavar="ID", help="steps that saw this document")
    parser.add_argument("--until", type=zero_or_more, metavar="N", help="with --document: search the first N steps")
    parser.add_argument(
        "--tokens",
        metavar="TOKENS",
        help="token shards, if they were moved (default: as recorded in RUN/stream.json)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array")


def run(args: argparse.Namespace) -> None:
    """Trace, and print one line per span of a document."""
    from dataclasses import replace

    from piledriver.core.errors import UsageError
    from piledriver.data.trace import trace_document, trace_step

    if args.step is not None:
        found = trace_step(args.run, args.step - 1, args.tokens)
    elif args.until is None:
        raise UsageError("--document needs --until", fix="add --until N, the number of steps to search")
    else:
        found = trace_document(args.run, args.document, until=args.until, tokens=args.tokens)
    # The record counts steps from 0; metrics, progress and checkpoints count from 1.
    found = [replace(sighting, step=sighting.step + 1) for sighting in found]
    if args.json:
        print(json.dumps([asdict(sighting) for sighting in found], ensure_ascii=False))
        return
    for sighting in found:
        place = f"bytes {sighting.bytes[0]}-{sighting.bytes[1]}" if sighting.bytes else "bytes unknown"
        print(
            f"step {sighting.step}  window {sighting.window}  {sighting.document}  {sighting.source}  "
            f"{sighting.licence or '-'}  {sighting.origin or '-'}  "
            f"tokens {sighting.tokens[0]}-{sighting.tokens[1]}  {place}"
        )
    print(f"{len({sighting.document for sighting in found})} documents, {len(found)} spans")
