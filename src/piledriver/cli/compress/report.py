"""`piledriver compress report CONFIG.yaml [key=value ...]`: compare model folders."""

from __future__ import annotations

import argparse
import json
from typing import Any

from piledriver.cli.compress.arguments import configure

EXAMPLE = "piledriver compress report models=[run/model,small] corpus=corpus/test out=report"
KEYS = "piledriver.compress.folders:ReportConfig"

__all__ = ["EXAMPLE", "KEYS", "configure", "run"]


def run(args: argparse.Namespace) -> None:
    """Write report.html and report.json, and print the table."""
    from piledriver.compress.folders import ReportConfig, report_folders
    from piledriver.core import storage
    from piledriver.core.config import load_config

    config = load_config(ReportConfig, args.config, args.overrides)
    for folder in (*config.models, config.corpus):
        storage.require(folder)
    report = report_folders(config)
    if args.json:
        print(json.dumps(report, indent=1))
        return
    print_report(report)
    print(f"{config.out}/report.html has the whole report")


def print_report(report: dict[str, Any]) -> None:
    """Print size, bits per byte, change and speed of each model."""
    batches = list(report["models"][0]["tokens_per_second"])
    heads = "".join(f"{f'tokens/s at {batch}':>16}" for batch in batches)
    print(f"{'model':<24}{'parameters':>12}{'MB':>10}{'BPB':>9}{'change':>10}{heads}")
    for row in report["models"]:
        change = "" if row["change"] is None or row["change"][0] is None else f"{100 * row['change'][0]:+.2f}%"
        speeds = "".join(f"{row['tokens_per_second'][batch]:>16,.0f}" for batch in batches)
        bits = row["bits_per_byte"]["all"]["bits_per_byte"]
        print(
            f"{row['name']:<24}{row['parameters'] / 1e6:>11,.1f}M{row['bytes'] / 1e6:>10,.2f}{bits:>9.4f}"
            f"{change:>10}{speeds}"
        )
