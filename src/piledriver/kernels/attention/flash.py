"""torch's flash attention with its log-sum-exp: plain causal or full attention, from which ring attention is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piledriver.kernels import torch_private
from piledriver.kernels.attention.kernel import AttentionKernel, Mask
from piledriver.kernels.attention.reference import repeat_heads
from piledriver.kernels.attention.sdpa import SDPA


class FlashAttention(AttentionKernel):
    """Flash attention on a CPU, and on a GPU in 16 bits with heads of up to 256 numbers."""

    documents = window = alibi = softcap = False
    log_sum_exp = True
    devices = frozenset({"cpu", "cuda"})
    ops_to_save = SDPA.ops_to_save

    @staticmethod
    def takes(q: Tensor) -> bool:
        """Return whether torch has a flash kernel for this device, dtype and head size."""
        if q.device.type == "cpu":
            return True
        small = q.dtype in (torch.bfloat16, torch.float16)
        return q.is_cuda and small and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float, **_: Any) -> Tensor:
        k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
        return self.with_log_sum_exp(q, k, v, True, scale)[0]

    def with_log_sum_exp(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        if q.device.type == "cpu":
            out, lse = torch_private.flash_attention_cpu(q, k, v, 0.0, causal, scale=scale)
        else:
            out, lse = torch_private.flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]
        return out, lse.float()

    def backward(
        self, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if q.device.type == "cpu":
            grads = torch_private.flash_attention_cpu_backward(gradient, q, k, v, out, lse, 0.0, causal, scale=scale)
        else:
            # The state of a dropout that is off: the kernel only asks for room.
            state = torch.empty(2, dtype=torch.uint64, device=q.device)
            options = (None, None, q.shape[2], k.shape[2], 0.0, causal, state, torch.empty_like(state))
            grads = torch_private.flash_attention_backward(gradient, q, k, v, out, lse, *options, scale=scale)
        d_q, d_k, d_v = grads
        return d_q, d_k, d_v
