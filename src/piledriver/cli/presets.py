"""`piledriver presets`: list the model shapes that `model: NAME` can name."""

from __future__ import annotations

import argparse
import json
from typing import Any

EXAMPLE = "piledriver presets"
_SHAPE = ("layers", "dim", "heads", "kv_heads", "vocab_size", "max_positions")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: argparse.Namespace) -> None:
    """Print one line per preset."""
    from piledriver.models.model_size import short_count

    rows = list_presets()
    if args.json:
        print(json.dumps(rows, indent=2))
        return
    width = max(len(row["preset"]) for row in rows)
    columns = list(rows[0])[1:]
    widths = [max(len(column), 9) for column in columns]
    print(f"{'preset':<{width}}" + "".join(f"  {name:>{size}}" for name, size in zip(columns, widths, strict=True)))
    for row in rows:
        cells = [short_count(row[column]) if "parameters" in column else str(row[column]) for column in columns]
        print(
            f"{row['preset']:<{width}}" + "".join(f"  {cell:>{size}}" for cell, size in zip(cells, widths, strict=True))
        )


def list_presets() -> list[dict[str, Any]]:
    """Return name, parameters, active parameters (of a mixture of experts), shape and peak learning rate of each."""
    from piledriver.models.model_size import active_parameter_count, parameter_count
    from piledriver.models.presets import learning_rate, preset, preset_names

    rows = []
    for name in preset_names():
        config = preset(name)
        counts = {"parameters": parameter_count(config), "active_parameters": active_parameter_count(config)}
        shape = {key: getattr(config, key) for key in _SHAPE}
        rows.append({"preset": name, **counts, **shape, "learning_rate": learning_rate(name)})
    return rows
