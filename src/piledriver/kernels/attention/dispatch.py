"""Which attention kernel runs: chosen when the mask is built, read off the mask's form when attention is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.core.errors import UsageError
from piledriver.kernels.attention.flex import FlexAttention, flex
from piledriver.kernels.attention.kernel import AttentionKernel, Mask, attention_kernel
from piledriver.kernels.attention.reference import ReferenceAttention
from piledriver.kernels.attention.sdpa import SDPA, sdpa
from piledriver.kernels.attention.varlen import VarlenAttention, varlen

_SDPA, _VARLEN, _FLEX, _REFERENCE = SDPA(), VarlenAttention(), FlexAttention(), ReferenceAttention()


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention of every query over the keys that `mask` allows; causal if the mask is empty.

    q is [batch, heads, time, head_dim]; k and v may have fewer heads, each shared by several queries. `window` and
    `slopes` repeat what a dense mask contains, for the kernels that read other forms. `sinks` are scores, one per head,
    that take part in the softmax and attend to nothing.
    """
    if mask.kernel is not None:
        extra = {} if sinks is None else {"sinks": sinks}
        return mask.kernel(q, k, v, mask, scale=scale, window=window, softcap=softcap, slopes=slopes, **extra)
    if mask.block is not None:
        return flex(q, k, v, mask.block, scale, softcap, slopes, sinks)
    if mask.boundaries is not None:
        return varlen(q, k, v, mask.boundaries, scale, window)
    if softcap is not None or sinks is not None:
        return _REFERENCE(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks)
    return sdpa(q, k, v, mask.dense, scale, causal=mask.dense is None)


def choose_kernel(
    kernel: str | AttentionKernel,
    device: torch.device,
    *,
    documents: bool = False,
    window: bool = False,
    alibi: bool = False,
    softcap: bool = False,
    sinks: bool = False,
) -> AttentionKernel:
    """Return the attention kernel of a name, checked against what is needed; `auto` takes the fastest that fits.

    Without a mask, and on a CPU, `auto` is torch's `sdpa` (`reference` with soft-capping or sinks). On a GPU it is
    `varlen` for packed documents, and `flex` for windows, ALiBi, soft-capping and sinks.
    """
    if kernel == "auto":
        # A compiler may trace this: no look-up in the registry.
        if device.type != "cuda" or not (documents or window or alibi or softcap or sinks):
            return _REFERENCE if softcap or sinks else _SDPA
        return _VARLEN if documents and not (alibi or softcap or sinks) else _FLEX
    chosen = attention_kernel(kernel) if isinstance(kernel, str) else kernel
    missing = chosen.missing(documents=documents, window=window, alibi=alibi, softcap=softcap, sinks=sinks)
    if missing:
        raise UsageError(
            f"{type(chosen).__name__} does not support {' and '.join(missing)}", fix="use the kernel flex, or auto"
        )
    return chosen
