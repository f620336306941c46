"""`accelerate.hooks`: the hooks of `piledriver.serve.placement`."""

from piledriver.serve.placement.align_devices import (
    AlignDevicesHook,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from piledriver.serve.placement.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from piledriver.serve.placement.layerwise_casting import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING, LayerwiseCastingHook
from piledriver.serve.placement.model_offload import CpuOffload, UserCpuOffloadHook
