"""`accelerate.utils.modeling`: sizes, device maps, tensors and weights of `piledriver.serve.placement`."""

from __future__ import annotations

from typing import Any

from piledriver.accelerator.options.handlers import AutocastKwargs
from piledriver.compat.accelerate.state import PartialState
from piledriver.engine.layout import resolve_layout
from piledriver.engine.precision import autocast
from piledriver.plan.placement.sizes import compute_module_sizes, dtype_byte_size
from piledriver.serve.placement.load_checkpoint import (
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    load_checkpoint_in_model,
    load_state_dict,
)
from piledriver.serve.placement.maps.allocation import get_module_size_with_ties
from piledriver.serve.placement.maps.device_map import (
    check_device_map,
    check_tied_parameters_in_config,
    check_tied_parameters_on_same_device,
    clean_device_map,
    get_balanced_memory,
    infer_auto_device_map,
)
from piledriver.serve.placement.maps.sizes import (
    calculate_maximum_sizes,
    compute_module_total_buffer_size,
    convert_file_size_to_int,
    get_max_layer_size,
    get_max_memory,
)
from piledriver.serve.placement.tensors import (
    align_module_device,
    find_tied_parameters,
    get_non_persistent_buffers,
    has_offloaded_params,
    id_tensor_storage,
    is_peft_model,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)
from piledriver.serve.placement.weight_files import load_offloaded_weights


def get_mixed_precision_context_manager(native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None) -> Any:
    """Return an autocast context of the run's precision."""
    from piledriver.compat.accelerate.state import AcceleratorState

    state = AcceleratorState()
    layout = resolve_layout(None, state.mixed_precision if native_amp else "no")
    return autocast(layout, state.device.type, None if autocast_kwargs is None else autocast_kwargs.to_dict())


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> Any:
    """Return a gradient scaler for fp16."""
    import torch

    return torch.amp.GradScaler(PartialState().device.type, **kwargs)
