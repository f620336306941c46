"""One model on one mesh: `apply.py` holds the order of the steps, and each step has a folder."""

from piledriver.engine.errors import EngineError, LayoutError
from piledriver.engine.layout import Layout
from piledriver.engine.tiers import Offload

__all__ = ["EngineError", "Layout", "LayoutError", "Offload"]
