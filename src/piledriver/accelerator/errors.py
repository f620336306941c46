"""Ways to use the Accelerator that cannot be meant. Each is also the built-in error that Accelerate's users catch."""

from __future__ import annotations

from piledriver.core.errors import UsageError


class PrecisionError(UsageError, ValueError):
    """A precision that this device or build cannot compute in, or a name that is not one."""


class OptionError(UsageError, ValueError):
    """Arguments that contradict each other, or that this installation cannot honour."""


class NotPreparedError(UsageError, RuntimeError):
    """A verb that needs prepared objects was called before `prepare`: gradients would not be averaged."""


class PreparedTwiceError(UsageError, ValueError):
    """An object was prepared again by somebody else: its gradients would be averaged twice."""


class NoTrackerError(UsageError, ValueError):
    """A tracker was asked for that was not initialised."""
