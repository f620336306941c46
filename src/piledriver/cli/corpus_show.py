"""`piledriver corpus show PATH`: print documents, or with --dropped the documents that a build left out."""

from __future__ import annotations

import argparse
import json
from itertools import islice


def configure(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("path", help="a shard or a folder of shards")
    parser.add_argument("--source", help="only documents of this source")
    parser.add_argument("--limit", type=int, default=5, metavar="N", help="how many documents (default 5)")
    parser.add_argument("--start", type=int, default=0, metavar="N", help="begin at this document")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--dropped", action="store_true", help="what a build dropped, from the ledger of its corpus")
    parser.add_argument("--stage", help="with --dropped: only what this stage dropped")
    parser.add_argument("--reason", help="with --dropped: only reasons that contain this")


def run(args: argparse.Namespace) -> None:
    """Print the documents, each under a line that says what it is."""
    if args.dropped:
        return _run_dropped(args)
    from piledriver.corpus import read_shards
    from piledriver.corpus.document import to_line
    from piledriver.corpus.sources import resolve

    name = resolve(args.source).name if args.source else None
    chosen = (document for document in read_shards(args.path, start=args.start) if name in (None, document.source))
    for document in islice(chosen, args.limit):
        if args.json:
            print(to_line(document).decode().rstrip("\n"))
            continue
        print(f"--- {document.id}  {document.source}  {json.dumps(document.meta, ensure_ascii=False)}")
        print(document.text, end="\n\n")


def _run_dropped(args: argparse.Namespace) -> None:
    """One line for each document that was dropped: id, source, stage, reason, and which was kept in its place."""
    from piledriver.corpus.ledger_reader import read_ledger

    rows = read_ledger(args.path, source=args.source, stage=args.stage, reason=args.reason)
    for row in islice(rows, args.start, args.start + args.limit):
        if args.json:
            print(json.dumps(row, ensure_ascii=False))
            continue
        said = f"{row['stage']}: {row['reason']}" + (f" ({row['detail']})" if row["detail"] else "")
        print(
            f"{row['id'] or row['origin']}  {row['source']}  {said}" + (f"  kept {row['kept']}" if row["kept"] else "")
        )
