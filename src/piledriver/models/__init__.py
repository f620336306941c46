"""Floor 2: decoder transformers from small blocks, presets as data, Hugging Face weights both ways. No parallelism.

- `config`: the shape of a model, one frozen dataclass; `presets`: known shapes by name; `sizes`: parameters and FLOPs
- `transformer`: the model; `block`, `attention`, `mlp`, `moe`, `layers`, `rotary`: what it is made of
- `masks`: packed documents; `attend`: the attention kernels; `cache`: keys and values for generation
- `loss`: cross-entropy without the logits; `initialise`: first weights, muP; `axes`: names of dimensions
- `interchange`: folders of `transformers`, read and written
"""

from piledriver.models.attention.cache import KVCache
from piledriver.models.attention.masks import Masks, make_masks
from piledriver.models.axes import parameter_axes
from piledriver.models.config import ModelConfig, MoEConfig, RopeScaling
from piledriver.models.initialise import initialise, learning_rate_scales
from piledriver.models.loss import LossSums, linear_cross_entropy, token_losses
from piledriver.models.transformer import Transformer

__all__ = [
    "KVCache",
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
