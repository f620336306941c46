"""Floor 1: what machine is this, which rank am I. The only room that reads environment variables."""

from piledriver.runtime.machine import describe_machine

__all__ = ["describe_machine"]
