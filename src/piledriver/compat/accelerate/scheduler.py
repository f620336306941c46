"""`AcceleratedScheduler` is our `PreparedScheduler`: it steps once per optimizer step."""

from piledriver.accelerator.wrappers.scheduler import PreparedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
