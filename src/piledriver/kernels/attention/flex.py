"""torch's flex attention: block masks with ALiBi and soft-capped scores, compiled to one GPU kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from piledriver.kernels.attention.kernel import AttentionKernel, Mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block: BlockMask,
    scale: float,
    softcap: float | None,
    slopes: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention under a block mask, with scores capped, then lowered by ALiBi.

    A sink of score s lowers all probabilities by exp(lse) / (exp(lse) + exp(s)), where lse is the log-sum-exp of the
    scores, which the kernel returns.
    """
    # Imported here: it brings the compiler with it, which few programs need.
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def score_mod(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[head] * (query - key)
        return score

    # Outside a compiled model the GPU kernel exists only through the compiler; on a CPU the plain formula runs.
    compiled = q.is_cuda and not torch.compiler.is_compiling()
    kernel: Any = _compiled(flex_attention) if compiled else flex_attention
    out = kernel(
        q,
        k,
        v,
        score_mod=None if softcap is None and slopes is None else score_mod,
        block_mask=block,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        return cast(Tensor, out)
    out, aux = out
    share = torch.sigmoid(aux.lse.float() - sinks.float()[None, :, None])
    return cast(Tensor, (out * share.unsqueeze(-1)).to(q.dtype))


@functools.cache
def _compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(kernel)


class FlexAttention(AttentionKernel):
    """Any mask and score; the general kernel on a GPU."""

    mask_form = "block"
    sinks = True
    ops_to_save = ("flex_attention",)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float, **scores: Any) -> Tensor:
        assert mask.block is not None
        return flex(q, k, v, mask.block, scale, scores.get("softcap"), scores.get("slopes"), scores.get("sinks"))
