"""Compare our masks and kernels with dense masks of `transformers` and the formula of attention, on a small input."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from piledriver.engine.fused.attention.masks import (
    SMALLEST_HEAD,
    MaskParts,
    block_mask_of,
    head_width,
    mask_of,
    read_mask_function,
)
from piledriver.kernels.attention import Mask, attend, build_mask
from piledriver.kernels.attention.reference import reference_attention

_LENGTH = 8
_TOLERANCE = 1e-2
"""Largest relative difference of outputs in bf16."""


class Scores(NamedTuple):
    """What a model does to its attention scores that only flex attention and the formula compute."""

    softcap: float | None = None
    sinks: bool = False


def why_attention_differs(config: Any, device: torch.device, *, flex: bool, scores: Scores | None) -> str | None:
    """Return how our masks differ from the dense masks of `sdpa`, or our kernels from the formula; None if they agree.

    `flex` says whether flex attention will run: its kernel is compiled for the comparison, which takes seconds.
    `scores` are those of a model that has no `sdpa`; None for one that has.
    """
    from transformers import masking_utils as theirs

    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 2, 3]], device=device)
    causal, packed = theirs.causal_mask_function, theirs.packed_sequence_mask_function(documents)
    window = theirs.sliding_window_causal_mask_function(3)
    given = {
        "batch_size": 2,
        "q_length": _LENGTH,
        "kv_length": _LENGTH,
        "device": device,
        "allow_is_causal_skip": False,
    }
    cases = {
        "causal": (causal, MaskParts()),
        "packed": (theirs.and_masks(causal, packed), MaskParts(documents=documents)),
        "window": (window, MaskParts(3)),
        "packed window": (theirs.and_masks(window, packed), MaskParts(3, documents)),
    }
    for name, (function, expected) in cases.items():
        found = read_mask_function(function)
        if found is None or found.window != expected.window or found.documents is not expected.documents:
            return f"this version of transformers describes a {name} mask in another way"
        dense = theirs.sdpa_mask(**given, mask_function=function)
        ours = _dense(expected, device)
        if dense is None or not bool((dense == ours).all()):
            return f"its {name} mask differs from ours"
    given |= {"config": config, "dtype": torch.bfloat16}
    why: str | None = None
    parts = MaskParts(documents=documents)
    if scores is None and (mask := mask_of(parts, given)) is not None and mask.boundaries is not None:
        why = _why_kernel_differs("variable-length", mask, parts, config, device, Scores())
    if why is None and flex and head_width(config) >= SMALLEST_HEAD:
        parts = MaskParts(3, documents)
        why = _why_kernel_differs("flex", block_mask_of(parts, given), parts, config, device, scores or Scores())
    return why


def _dense(parts: MaskParts, device: torch.device) -> Tensor:
    dense = build_mask("dense", _LENGTH, device, parts.documents, window=parts.window).dense
    return torch.ones(_LENGTH, _LENGTH, dtype=torch.bool, device=device).tril()[None, None] if dense is None else dense


@torch.no_grad()
def _why_kernel_differs(
    name: str, mask: Mask, parts: MaskParts, config: Any, device: torch.device, scores: Scores
) -> str | None:
    """Compare a kernel in bf16 with the formula in fp32 under the same mask as a dense one."""
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (3, 2, 2, _LENGTH, head_width(config))
    q, k, v = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    sinks = torch.randn(2, generator=generator, device=device) if scores.sinks else None
    scale = shape[-1] ** -0.5
    try:
        found = attend(q, k, v, mask, scale=scale, softcap=scores.softcap, sinks=sinks)
    except Exception as error:
        return f"the trial of {name} attention failed: {type(error).__name__}: {error}"
    with torch.autocast(device.type, enabled=False):
        expected = reference_attention(
            *(x.float() for x in (q, k, v)),
            mask=_dense(parts, device),
            scale=scale,
            softcap=scores.softcap,
            sinks=sinks,
        )
    apart = float((found.float() - expected).norm() / expected.norm())
    return None if apart < _TOLERANCE else f"{name} attention differs by {apart:.1e}"
