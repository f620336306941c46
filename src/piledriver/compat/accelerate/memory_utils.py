"""`accelerate.memory_utils`, the older path of `utils.memory`."""

from piledriver.accelerator.memory import find_executable_batch_size, release_memory
