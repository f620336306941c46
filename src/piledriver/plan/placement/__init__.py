"""Place the modules of a model for inference on devices, in host memory and on disk, by predicted time."""

from piledriver.plan.placement.by_time import DeviceMap
from piledriver.plan.placement.on_hardware import device_map

__all__ = ["DeviceMap", "device_map"]
