"""torch's variable-length attention: the documents of a packed batch as sequences of their own, on a GPU."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion

from piledriver.kernels.attention.kernel import AttentionKernel, Mask
from piledriver.kernels.attention.reference import repeat_heads

# Before torch 2.12 queries could not share key heads.
_SHARES_HEADS = TorchVersion(torch.__version__) >= "2.12"


def varlen(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, scale: float, window: int | None) -> Tensor:
    """Return causal attention within documents that begin at `boundaries` of the flattened batch."""
    # Imported here: it brings the compiler with it, which few programs need.
    from torch.nn.attention.varlen import varlen_attn

    batch, heads, time, _ = q.shape
    options: dict[str, Any] = {"scale": scale, "window_size": (-1 if window is None else window - 1, 0)}
    if k.shape[1] != heads:
        if _SHARES_HEADS:
            options["enable_gqa"] = True
        else:
            k, v = repeat_heads(k, heads), repeat_heads(v, heads)
    width = v.shape[-1]
    if width != q.shape[-1]:
        # The kernel has one head size; latent attention has narrower values.
        v = F.pad(v, (0, q.shape[-1] - width))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = varlen_attn(q, k, v, boundaries, boundaries, time, time, **options)
    return cast(Tensor, out).view(batch, time, heads, -1)[..., :width].transpose(1, 2)


class VarlenAttention(AttentionKernel):
    """Attention within documents, without a mask tensor."""

    mask_form = "boundaries"
    alibi = False
    softcap = False
    devices = frozenset({"cuda"})
    dtypes = frozenset({torch.bfloat16, torch.float16})
    ops_to_save = ("torch_attn::_varlen_attn",)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float, window: int | None = None, **_: Any
    ) -> Tensor:
        assert mask.boundaries is not None
        return varlen(q, k, v, mask.boundaries, scale, window)
