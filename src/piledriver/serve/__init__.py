"""Floor 6: run a trained model. `generate` continues prompts; `placement` runs models larger than a device."""

from __future__ import annotations

import importlib
from typing import Any

_FACE = {"Sampling": "decode", "generate": "decode"}

__all__ = ["Sampling", "generate"]


def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module(f"piledriver.serve.{_FACE[name]}"), name)
    raise AttributeError(f"module 'piledriver.serve' has no attribute {name!r}")
