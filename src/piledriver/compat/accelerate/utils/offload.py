"""`accelerate.utils.offload`: weights on disk."""

from piledriver.serve.placement.weight_files import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
