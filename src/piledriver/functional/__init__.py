"""Floor 2: modules as pure functions over immutable trees, and everything to train them.

    from piledriver.functional import Decoder, TrainState, adamw, cross_entropy, jit, key, value_and_grad

- `module`: define (a frozen dataclass with `__call__`), `init`, `apply`; `tree`: immutable trees; `keys`: randomness
- `layers/`: Dense to Decoder; `lift`: remat, scan and vmap as modules; `transforms`: grad, vmap, jit of functions
- `optimizers`, `schedules`, `muon`, `train`, `metrics`: pure training; `partitioning`: rules from names to a mesh
- `files`, `msgpack`: safetensors, flax's format, safe pickles; `surgery`, `tabulate`: looking at and changing trees
- `bridge`: `torch.nn` both ways
"""

from piledriver.functional.bridge import from_torch, to_torch
from piledriver.functional.layers.attention import (
    MultiHeadAttention,
    attention_mask,
    causal_mask,
    combine_masks,
    dot_product_attention,
    padding_mask,
)
from piledriver.functional.layers.conv import Conv, ConvTranspose
from piledriver.functional.layers.dropout import Dropout
from piledriver.functional.layers.embed import Embed
from piledriver.functional.layers.linear import Dense, DenseGeneral, Einsum
from piledriver.functional.layers.lora import LoRADense, merge_lora
from piledriver.functional.layers.norm import BatchNorm, GroupNorm, LayerNorm, RMSNorm
from piledriver.functional.layers.pooling import avg_pool, max_pool, min_pool
from piledriver.functional.layers.positions import LearnedPositions, alibi_bias, rotary_tables, rotate, sinusoidal
from piledriver.functional.layers.recurrent import RNN, Bidirectional, GRUCell, LSTMCell
from piledriver.functional.layers.transformer import Decoder, GatedMLP, TransformerBlock, cross_entropy
from piledriver.functional.masks import mask_tree, not_vectors
from piledriver.functional.metrics import Accuracy, Average, Metrics, Welford, merge_all
from piledriver.functional.module import Module, Spec, Variable
from piledriver.functional.optimizers.groups import accumulate, by_label, masked
from piledriver.functional.optimizers.muon import muon
from piledriver.functional.optimizers.optimizers import (
    Optimizer,
    adam,
    adamw,
    add_decayed_weights,
    apply_updates,
    chain,
    clip_by_global_norm,
    clip_by_value,
    global_norm,
    lion,
    scale,
    scale_by_adam,
    scale_by_lion,
    scale_by_rate,
    sgd,
    trace,
)
from piledriver.functional.optimizers.schedules import (
    constant_schedule,
    cosine_schedule,
    exponential_schedule,
    joined_schedule,
    linear_schedule,
    warmup_cosine_schedule,
    warmup_stable_decay_schedule,
)
from piledriver.functional.random.keys import (
    Key,
    bernoulli,
    bits,
    fold_in,
    key,
    normal,
    permutation,
    randint,
    split,
    truncated_normal,
    uniform,
)
from piledriver.functional.serialization.files import (
    load_msgpack,
    load_pickle,
    load_safetensors,
    restore_part,
    restore_safetensors,
    save_msgpack,
    save_safetensors,
)
from piledriver.functional.serialization.msgpack import from_bytes, restore, to_bytes
from piledriver.functional.state_dict import from_state_dict, to_state_dict
from piledriver.functional.struct import replace, static, tree_dataclass
from piledriver.functional.surgery import (
    TransferReport,
    either,
    every,
    has_dims,
    has_dtype,
    invert,
    map_where,
    merge_trees,
    path_contains,
    path_matches,
    rename,
    select_leaves,
    split_tree,
    transfer,
)
from piledriver.functional.tabulate import tabulate
from piledriver.functional.train import EMA, DynamicScale, EarlyStopping, TrainState, microbatched, select
from piledriver.functional.transforms.control import cond, fori_loop, scan, while_loop
from piledriver.functional.transforms.lift import Remat, Scanned, Vmapped
from piledriver.functional.transforms.transforms import eval_shape, grad, jit, jvp, remat, value_and_grad, vjp, vmap
from piledriver.functional.tree import Tree, flatten, map_with_path, tree_leaves, tree_map, unflatten

__all__ = [
    "EMA",
    "RNN",
    "Accuracy",
    "Average",
    "BatchNorm",
    "Bidirectional",
    "Conv",
    "ConvTranspose",
    "Decoder",
    "Dense",
    "DenseGeneral",
    "Dropout",
    "DynamicScale",
    "EarlyStopping",
    "Einsum",
    "Embed",
    "GRUCell",
    "GatedMLP",
    "GroupNorm",
    "Key",
    "LSTMCell",
    "LayerNorm",
    "LearnedPositions",
    "LoRADense",
    "Metrics",
    "Module",
    "MultiHeadAttention",
    "Optimizer",
    "RMSNorm",
    "Remat",
    "Scanned",
    "Spec",
    "TrainState",
    "TransferReport",
    "TransformerBlock",
    "Tree",
    "Variable",
    "Vmapped",
    "Welford",
    "accumulate",
    "adam",
    "adamw",
    "add_decayed_weights",
    "alibi_bias",
    "apply_updates",
    "attention_mask",
    "avg_pool",
    "bernoulli",
    "bits",
    "by_label",
    "causal_mask",
    "chain",
    "clip_by_global_norm",
    "clip_by_value",
    "combine_masks",
    "cond",
    "constant_schedule",
    "cosine_schedule",
    "cross_entropy",
    "dot_product_attention",
    "either",
    "eval_shape",
    "every",
    "exponential_schedule",
    "flatten",
    "fold_in",
    "fori_loop",
    "from_bytes",
    "from_state_dict",
    "from_torch",
    "global_norm",
    "grad",
    "has_dims",
    "has_dtype",
    "invert",
    "jit",
    "joined_schedule",
    "jvp",
    "key",
    "linear_schedule",
    "lion",
    "load_msgpack",
    "load_pickle",
    "load_safetensors",
    "map_where",
    "map_with_path",
    "mask_tree",
    "masked",
    "max_pool",
    "merge_all",
    "merge_lora",
    "merge_trees",
    "microbatched",
    "min_pool",
    "muon",
    "normal",
    "not_vectors",
    "padding_mask",
    "path_contains",
    "path_matches",
    "permutation",
    "randint",
    "remat",
    "rename",
    "replace",
    "restore",
    "restore_part",
    "restore_safetensors",
    "rotary_tables",
    "rotate",
    "save_msgpack",
    "save_safetensors",
    "scale",
    "scale_by_adam",
    "scale_by_lion",
    "scale_by_rate",
    "scan",
    "select",
    "select_leaves",
    "sgd",
    "sinusoidal",
    "split",
    "split_tree",
    "static",
    "tabulate",
    "to_bytes",
    "to_state_dict",
    "to_torch",
    "trace",
    "transfer",
    "tree_dataclass",
    "tree_leaves",
    "tree_map",
    "truncated_normal",
    "unflatten",
    "uniform",
    "value_and_grad",
    "vjp",
    "vmap",
    "warmup_cosine_schedule",
    "warmup_stable_decay_schedule",
    "while_loop",
]
