"""`piledriver estimate-memory MODEL`: bytes of a model by dtype, with Accelerate's arguments."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

EXAMPLE = "piledriver estimate-memory llama-3-8b --dtypes float32 float16"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("model_name", help="preset, or folder of a Hugging Face model")
    parser.add_argument(
        "--library_name", choices=["timm", "transformers"], help="accepted; folders name their library themselves"
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        default=["float32", "float16", "int8", "int4"],
        choices=["float32", "float16", "bfloat16", "int8", "int4"],
        help="dtypes of the weights (default: float32 float16 int8 int4)",
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="accepted; no remote code is run")
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: argparse.Namespace) -> None:
    """Print a table: the largest layer, the weights, and training with Adam."""
    from piledriver.observe.memory import readable
    from piledriver.plan.estimate import estimate_memory

    rows = estimate_memory(args.model_name, args.dtypes)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"{args.model_name}: weights, and training with Adam without activations; `piledriver plan` adds these")
    print(f"{'dtype':<10} {'largest layer':>14} {'total size':>12} {'training using Adam':>20}")
    for row in rows:
        training = "N/A" if row.training is None else readable(row.training)
        print(f"{row.dtype:<10} {readable(row.largest_layer):>14} {readable(row.total):>12} {training:>20}")
