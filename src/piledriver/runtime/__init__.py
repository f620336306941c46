"""Floor 1: this machine, this rank, launching, collectives, seeds. The only reader of environment variables.

- `world`: this process among all; `detect_launcher`, `devices`, `hardware`, `environment`: what it is detected from
- `connection`: the process group; `process_order`: run code on some ranks first, or only there
- `collectives/`: gather, reduce, broadcast and scatter over nested structures, barriers, agreement checks
- `launch/`: start processes from a command line, a notebook or a Slurm script
- `seeds`: random generators; `report`, `check`: what `piledriver env` and `piledriver test` print

Names are imported on first use, so that `piledriver env` and the corpus commands start without torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_FACE = {
    "World": "world",
    "detect_world": "world",
    "Hardware": "hardware",
    "find_hardware": "hardware",
    "connect": "connection",
    "disconnect": "connection",
    "barrier": "collectives.barrier",
    "main_process_first": "process_order",
    "local_main_process_first": "process_order",
    "split_between_processes": "collectives.split",
    "Trigger": "collectives.trigger",
    "set_seed": "seeds",
    "capture_rng": "seeds",
    "restore_rng": "seeds",
    "synchronise_rng": "seeds",
    "describe_machine": "report",
}

__all__ = list(_FACE)


def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module(f"piledriver.runtime.{_FACE[name]}"), name)
    raise AttributeError(f"module 'piledriver.runtime' has no attribute {name!r}")
