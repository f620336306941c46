"""`accelerate.local_sgd`."""

from piledriver.engine.data_parallel.local_sgd import LocalSGD
