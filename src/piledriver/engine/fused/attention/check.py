"""Compare our masks and variable-length attention with the dense masks of `transformers`, on a small input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from piledriver.engine.fused.attention.masks import MaskParts, head_width, mask_of, read_mask_function
from piledriver.kernels.attention import Mask, attend, build_mask

_LENGTH = 8
_TOLERANCE = 1e-2
"""Largest relative difference of outputs in bf16."""


def why_masks_differ(config: Any, device: torch.device) -> str | None:
    """Return how our masks or kernels differ from the dense masks of `sdpa`; None if they agree."""
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
    return _why_varlen_differs(config, documents, given, device)


def _dense(parts: MaskParts, device: torch.device) -> Tensor:
    dense = build_mask("dense", _LENGTH, device, parts.documents, window=parts.window).dense
    return torch.ones(_LENGTH, _LENGTH, dtype=torch.bool, device=device).tril()[None, None] if dense is None else dense


def _why_varlen_differs(config: Any, documents: Tensor, given: dict[str, Any], device: torch.device) -> str | None:
    """Compare variable-length attention with `sdpa` under a dense mask, in bf16, where it would run."""
    parts = MaskParts(documents=documents)
    mask = mask_of(parts, {**given, "config": config, "dtype": torch.bfloat16})
    if mask is None or mask.boundaries is None:
        return None
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (3, 2, 2, _LENGTH, head_width(config))
    q, k, v = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    scale = shape[-1] ** -0.5
    found = attend(q, k, v, mask, scale=scale)
    expected = attend(q, k, v, Mask(dense=_dense(parts, device)), scale=scale)
    apart = float((found - expected).float().norm() / expected.float().norm())
    return None if apart < _TOLERANCE else f"variable-length attention differs by {apart:.1e}"
