"""`accelerate.utils.memory`."""

from piledriver.accelerator.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)
