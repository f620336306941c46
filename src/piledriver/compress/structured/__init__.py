"""Structured pruning: remove whole layers, hidden channels, attention groups, MLP neurons or experts.

The result is a plain smaller model with its own config.

- `shape`: what to keep; `importance`: scores from calibration text; `prune_shape`: choose, correct and remove
- `cut`: remove given parts of a model
"""

from __future__ import annotations

from piledriver.compress.structured.cut import KeptParts, cut
from piledriver.compress.structured.prune_shape import prune_shape
from piledriver.compress.structured.shape import SmallerShape

__all__ = ["KeptParts", "SmallerShape", "cut", "prune_shape"]
