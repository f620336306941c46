"""Floor 2: decoder transformers from small blocks, presets and families as data, Hugging Face interchange.

- `config`: the architecture, one frozen dataclass; `presets/`: published architectures by name
- `transformer`, `block`, `layers`: the model; `attention/` and `feed_forward/` (MLP, mixture of experts): its sublayers
- `quantised/`: layers with weights of 8 or 4 bits, which hold `codes` in place of a parameter
- `loss`: cross-entropy without materialised logits; `initial_weights`: initialisation and muP learning rates
- `model_size`: parameters, FLOPs, cache bytes; `axes`: names of dimensions, which the engine shards
- `interchange/`: checkpoint folders of `transformers`, read and written; `interchange/families/`: their names, as data

Parallelism lives in `engine/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from piledriver.core.lazy import lazy_names

if TYPE_CHECKING:
    from piledriver.models.attention.cache import KVCache
    from piledriver.models.attention.masks import Masks, make_masks
    from piledriver.models.axes import parameter_axes
    from piledriver.models.config import LatentAttentionConfig, ModelConfig, MoEConfig, RopeScaling
    from piledriver.models.initial_weights import initialise, learning_rate_scales
    from piledriver.models.loss import LossSums, linear_cross_entropy, token_losses
    from piledriver.models.transformer import Transformer

__all__ = [
    "KVCache",
    "LatentAttentionConfig",
    "LossSums",
    "Masks",
    "MoEConfig",
    "ModelConfig",
    "RopeScaling",
    "Transformer",
    "initialise",
    "learning_rate_scales",
    "linear_cross_entropy",
    "make_masks",
    "parameter_axes",
    "token_losses",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "KVCache": "attention.cache",
        "LatentAttentionConfig": "config",
        "LossSums": "loss",
        "Masks": "attention.masks",
        "MoEConfig": "config",
        "ModelConfig": "config",
        "RopeScaling": "config",
        "Transformer": "transformer",
        "initialise": "initial_weights",
        "learning_rate_scales": "initial_weights",
        "linear_cross_entropy": "loss",
        "make_masks": "attention.masks",
        "parameter_axes": "axes",
        "token_losses": "loss",
    },
)
