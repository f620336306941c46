"""The samples of a run: `samples.jsonl` in its folder, one generated text per line."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

FILE = "samples.jsonl"


def write_samples(out: str, step: int, samples: Sequence[dict[str, str]]) -> None:
    """Append the samples of a step."""
    if samples:
        with open(os.path.join(out, FILE), "a", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": step, **sample}, ensure_ascii=False) + "\n" for sample in samples)
