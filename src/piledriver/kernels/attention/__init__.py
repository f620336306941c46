"""Attention kernels. `choose_kernel` says which runs; `make_masks` of the models asks it once per batch.

| kernel | runs | supports |
|---|---|---|
| `sdpa` | everywhere; `auto` for plain causal attention, and on a CPU | dense masks: documents, window, ALiBi |
| `varlen` | GPU, 16 bits; `auto` for packed documents there | documents, window |
| `flex` | `auto` on a GPU for windows, ALiBi, soft-capping | everything, as a block mask |
| `flash` | CPU, and GPU in 16 bits; ring attention | plain causal attention with its log-sum-exp |
| `reference` | everywhere; `auto` on a CPU with soft-capping | everything, with the log-sum-exp; stores all scores |
"""

from piledriver.kernels.attention.dispatch import attend, choose_kernel
from piledriver.kernels.attention.kernel import ATTENTION, AttentionKernel, Mask, attention_kernel
from piledriver.kernels.attention.masks import (
    alibi_slopes,
    build_mask,
    dense_mask,
    document_boundaries,
    positions_in_documents,
)
from piledriver.kernels.attention.score_options import ScoreOptions

__all__ = [
    "ATTENTION",
    "AttentionKernel",
    "Mask",
    "ScoreOptions",
    "alibi_slopes",
    "attend",
    "attention_kernel",
    "build_mask",
    "choose_kernel",
    "dense_mask",
    "document_boundaries",
    "positions_in_documents",
]
