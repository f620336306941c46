"""`piledriver compress plan MODEL TO`: the size and speed that a compression would give."""

from __future__ import annotations

import argparse
import json

EXAMPLE = "piledriver compress plan llama-3-8b params:0.7+w4a16-g128 --hardware 1xh100-80g"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("model", help="a preset, or a model folder")
    parser.add_argument("to", help="a scheme (w4a16-g128), a share of block parameters (params:0.7), or both with +")
    parser.add_argument("--hardware", default="here", metavar="H", help="such as 1xh100-80g (default: here)")
    parser.add_argument("--head", choices=("int8", "fp8"), help="quantise the output projection too")
    parser.add_argument("--embedding", choices=("int8", "fp8"), help="quantise the embedding too")
    parser.add_argument("--length", type=int, default=512, metavar="N", help="tokens of context (default: 512)")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(args: argparse.Namespace) -> None:
    """Print the plan."""
    from piledriver.compress.forecast import plan_compression

    made = plan_compression(
        args.model,
        args.to,
        head=args.head,
        embedding=args.embedding,
        hardware=args.hardware,
        length=args.length,
    )
    print(json.dumps(made.as_json(), indent=1) if args.json else made.as_text())
