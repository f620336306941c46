"""piledriver: raw text to a measured, served language model, on whatever hardware there is.

The names below are imported when they are first used, so that `import piledriver` and the corpus commands stay light.
"""

from __future__ import annotations

import importlib
from typing import Any

# Public name -> the room that owns it.
_FACE: dict[str, str] = {}

__all__ = ["__version__", *_FACE]


def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module(_FACE[name]), name)
    if name == "__version__":
        from importlib import metadata

        return metadata.version("piledriver")
    raise AttributeError(f"module 'piledriver' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
