"""`accelerate.optimizer`: `AcceleratedOptimizer` is our `PreparedOptimizer`."""

from piledriver.accelerator.wrappers.optimizer import PreparedOptimizer as AcceleratedOptimizer
