"""torch's `scaled_dot_product_attention`: plain causal attention at full speed, and any dense mask."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.kernels.attention.kernel import AttentionKernel, Mask


def sdpa(q: Tensor, k: Tensor, v: Tensor, dense: Tensor | None, scale: float | None, *, causal: bool) -> Tensor:
    """Return attention under a boolean or additive mask, or under the causal one."""
    if dense is not None and dense.dtype != torch.bool:
        dense = dense.to(q.dtype)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=dense, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


class SDPA(AttentionKernel):
    """torch's fused kernels; which one of them runs is torch's choice."""

    softcap = False
    ops_to_save = (
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
    )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float, **_: Any) -> Tensor:
        return sdpa(q, k, v, mask.dense, scale, causal=mask.dense is None)
