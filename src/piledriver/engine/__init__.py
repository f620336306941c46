"""One model laid out on one mesh. `apply.py` says the order of the steps once; each step is a file of its own."""

from piledriver.engine.errors import EngineError, LayoutError
from piledriver.engine.layout import Layout

__all__ = ["EngineError", "Layout", "LayoutError"]
