"""`accelerate.scheduler`: `AcceleratedScheduler` is our `PreparedScheduler`, one step per optimizer step."""

from piledriver.accelerator.wrappers.scheduler import PreparedScheduler as AcceleratedScheduler
