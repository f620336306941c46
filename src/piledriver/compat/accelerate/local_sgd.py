"""`LocalSGD`."""

from piledriver.accelerator.local_sgd import LocalSGD

__all__ = ["LocalSGD"]
