"""`deepspeed.runtime.utils.see_memory_usage`: log the memory of device and host."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

from piledriver.observe.memory.use import memory_use, reset_peak

_log = logging.getLogger("piledriver.compat.deepspeed")
_GB = 2**30


def see_memory_usage(message: str, force: bool = False, ranks: Sequence[int] = (0,)) -> None:
    """Log allocated, peak, reserved and host memory with a message, and reset the peak; nothing without `force`."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if not force or (ranks and rank not in ranks):
        return
    use = memory_use()
    _log.info(
        "%s\nMA %.2f GB  Max_MA %.2f GB  CA %.2f GB  host RSS %.2f GB, available %.2f GB",
        message,
        use.device_allocated / _GB,
        use.device_peak / _GB,
        use.device_reserved / _GB,
        use.host_rss / _GB,
        use.host_available / _GB,
    )
    reset_peak()
