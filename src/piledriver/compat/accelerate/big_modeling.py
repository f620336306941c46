"""`accelerate.big_modeling`: `piledriver.serve.placement` under its path."""

from piledriver.serve.placement.dispatch import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
)
from piledriver.serve.placement.empty_weights import init_empty_weights, init_on_device
from piledriver.serve.placement.layerwise_casting import attach_layerwise_casting_hooks
