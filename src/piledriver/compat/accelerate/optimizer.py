"""`AcceleratedOptimizer` is our `PreparedOptimizer`."""

from piledriver.accelerator.optimizer import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
