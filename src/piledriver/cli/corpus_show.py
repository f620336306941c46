"""`piledriver corpus show PATH`: print documents."""

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


def run(args: argparse.Namespace) -> None:
    """Print the documents, each under a line that says what it is."""
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
