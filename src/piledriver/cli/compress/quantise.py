"""`piledriver compress quantise CONFIG.yaml [key=value ...]`: quantise a model folder."""

from __future__ import annotations

import argparse
import json

from piledriver.cli.compress.arguments import configure

EXAMPLE = "piledriver compress quantise quantise.yaml scheme=w4a16-g128 method=gptq"
KEYS = "piledriver.compress.folders:QuantiseConfig"

__all__ = ["EXAMPLE", "KEYS", "configure", "run"]


def run(args: argparse.Namespace) -> None:
    """Write the compressed folder, and print what was done."""
    from piledriver.compress.folders import QuantiseConfig, quantise_folder
    from piledriver.core import storage
    from piledriver.core.config import load_config

    config = load_config(QuantiseConfig, args.config, args.overrides)
    storage.require(config.model)
    record = quantise_folder(config)
    if args.json:
        print(json.dumps(record, indent=2))
        return
    errors = record["relative_error"]
    worst = max(errors, key=lambda name: errors[name])
    print(f"{config.out}: {config.scheme} by {config.method}, {len(errors)} layers, {len(record['skipped'])} skipped")
    print(f"largest relative error {errors[worst]:.3g}: {worst}")
