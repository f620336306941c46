"""Errors of the Accelerator. Each is also the built-in error that Accelerate's users catch."""

from __future__ import annotations

from piledriver.core.errors import UsageError
from piledriver.engine.errors import PrecisionError

__all__ = ["NoTrackerError", "NotPreparedError", "OptionError", "PrecisionError", "PreparedTwiceError"]


class OptionError(UsageError, ValueError):
    """Arguments contradict each other, or are not supported."""


class NotPreparedError(UsageError, RuntimeError):
    """A verb that needs prepared objects was called before `prepare`: gradients would not be averaged."""


class PreparedTwiceError(UsageError, ValueError):
    """An object was prepared a second time: its gradients would be averaged twice."""


class NoTrackerError(UsageError, ValueError):
    """A tracker was requested that was not initialised."""
