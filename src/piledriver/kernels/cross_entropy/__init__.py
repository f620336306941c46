"""Cross-entropy of a linear output layer: in chunks of tokens, or with all logits at once (`full_cross_entropy`).

The step from a chunk's logits to their gradient has three kernels: `triton` on a GPU, `compiled` on an accelerator
without Triton, `reference` on a CPU.
"""

from piledriver.kernels.cross_entropy.chunked import (
    IGNORE_INDEX,
    add_product,
    chunked_cross_entropy,
    default_chunk_tokens,
)
from piledriver.kernels.cross_entropy.reference import cap_logits, full_cross_entropy

__all__ = [
    "IGNORE_INDEX",
    "add_product",
    "cap_logits",
    "chunked_cross_entropy",
    "default_chunk_tokens",
    "full_cross_entropy",
]
