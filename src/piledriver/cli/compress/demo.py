"""`piledriver compress demo`: prune, recover, quantise and serve the demo's own model in a few minutes."""

from __future__ import annotations

import argparse
import os

EXAMPLE = "piledriver compress demo --out demo"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("--out", default="demo", metavar="DIR", help="folder of `piledriver demo` (default: demo)")
    parser.add_argument(
        "--minutes", type=float, default=0.75, metavar="M", help="minutes of training, if there is no model yet"
    )


def run(args: argparse.Namespace) -> None:
    """Run the demo, and print the table."""
    from piledriver.cli.compress.report import print_report
    from piledriver.cli.options.counts import cores
    from piledriver.demo.compression import run_compression_demo

    report = run_compression_demo(args.out, minutes=args.minutes, workers=cores())
    print()
    print_report(report)
    print(f"\nThe quantised model writes: The {report['sample']}")
    print(f"{os.path.join(args.out, 'compressed', 'report.html')} has the whole report")
    print(f"To talk to it: piledriver serve {os.path.join(args.out, 'compressed', 'quantised')}")
