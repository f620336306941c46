"""`piledriver demo`: run the whole pipeline on this machine's own files in a few minutes."""

from __future__ import annotations

import argparse

EXAMPLE = "piledriver demo --out demo --minutes 2"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("--out", default="demo", metavar="DIR", help="folder to write (default: demo)")
    parser.add_argument("--minutes", type=float, default=2.0, metavar="M", help="minutes of training (default: 2)")


def run(args: argparse.Namespace) -> None:
    """Run the demo, and print the table of bits per byte and a sample of each domain."""
    import os

    from piledriver.cli.options.counts import cores
    from piledriver.demo import run_demo
    from piledriver.demo.page import columns

    result = run_demo(args.out, minutes=args.minutes, workers=cores())
    shown = columns(result)
    width = max(len(name) for name in result.after)
    print(
        f"\nBits per byte of unseen text (lower is better; 8 is a model that knows nothing)\n\n{'':<{width}}"
        + "".join(f"{name:>18}" for name in shown)
    )
    for domain in result.after:
        print(f"{domain:<{width}}" + "".join(f"{column[domain]:>18.3f}" for column in shown.values()))
    print("\nContinuations: first words of unseen texts ... what the model writes\n")
    for sample in result.samples:
        # One line each; the report has the white space and the true continuations.
        prompt, written = (" ".join(text.split()) for text in (sample.prompt, sample.written))
        end = prompt if len(prompt) <= 60 else prompt[-60:].partition(" ")[2]
        print(f"{sample.domain:<{width}}  {end} ... {written[:60]}")
    print()
    print(f"{os.path.join(args.out, 'report.html')} has the plots; {sum(result.seconds.values()):.0f} s in total")
    print(f"To talk to the model: piledriver serve {os.path.join(args.out, 'run', 'model')}")
