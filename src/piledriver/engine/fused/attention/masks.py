"""The masks of `transformers`' causal models in the forms that fast kernels read: document boundaries, block masks.

`transformers` describes a mask as a function of indices, composed of known parts (causal, sliding window, packed
sequences). A mask made of these parts alone is built in our form; every other one stays the dense mask of `sdpa`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from piledriver.kernels.attention import Mask, build_mask

SMALLEST_HEAD = 16
"""The least head size of flex attention on a GPU."""
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


class MaskParts(NamedTuple):
    """What a causal mask is made of."""

    window: int | None = None
    documents: Tensor | None = None
    """[batch, time]: equal and adjacent within a document."""


def make_mask(**given: Any) -> Any:
    """Return the mask of a call: None for plain causal attention, a `Mask` for a fast kernel, or `sdpa`'s dense mask.

    Registered as the mask function of our attention; the arguments are `transformers`'.
    """
    from transformers.masking_utils import sdpa_mask

    parts = mask_parts_of(given)
    return sdpa_mask(**given) if parts is None else mask_of(parts, given)


def make_block_mask(**given: Any) -> Any:
    """Return the mask of a call for attention whose scores only flex attention computes, or the dense additive mask."""
    from transformers.masking_utils import eager_mask

    parts = mask_parts_of(given)
    return eager_mask(**given) if parts is None else block_mask_of(parts, given)


def has_kernels(device: torch.device) -> bool:
    """Return whether a device has kernels that skip what is masked."""
    return device.type == "cuda"


def mask_parts_of(given: dict[str, Any]) -> MaskParts | None:
    """Return what a mask consists of; None where it has parts that only a dense mask expresses."""
    length, padding = given["q_length"], given.get("attention_mask")
    square = (
        length > 1 and length == given["kv_length"] and _is_zero(given, "q_offset") and _is_zero(given, "kv_offset")
    )
    if not square or not has_kernels(torch.device(given.get("device", "cpu"))) or torch.compiler.is_compiling():
        return None
    config = given.get("config")
    if any(getattr(config, name, 0.0) for name in _DROPOUTS):
        return None
    if torch.device(given["device"]).type == "cuda" and 0 < head_width(config) < SMALLEST_HEAD:
        return None
    if padding is not None and not bool(padding.all()):
        return None
    found = read_mask_function(given.get("mask_function"))
    if found is None or (found.documents is None and not given.get("allow_is_causal_skip", True)):
        return None
    return found._replace(window=None if found.window is not None and found.window >= length else found.window)


def mask_of(parts: MaskParts, given: dict[str, Any]) -> Mask | None:
    """Return the mask in the form of the fastest kernel; None for plain causal attention."""
    if parts == MaskParts():
        return None
    if parts.documents is not None and parts.window is None and _fits_varlen(given):
        return build_mask("boundaries", given["q_length"], torch.device(given["device"]), parts.documents)
    return block_mask_of(parts, given)


def block_mask_of(parts: MaskParts, given: dict[str, Any]) -> Mask:
    """Return the block mask of flex attention."""
    device = torch.device(given["device"])
    # Compiled on a GPU: autocast, on in a forward pass and off in the trial, would compile it twice.
    with torch.autocast(device.type, enabled=False):
        if parts.documents is None:
            return _static_mask(given["q_length"], device, parts.window)
        return build_mask("block", given["q_length"], device, parts.documents, window=parts.window)


@functools.lru_cache(maxsize=16)
def _static_mask(length: int, device: torch.device, window: int | None) -> Mask:
    return build_mask("block", length, device, window=window)


def _fits_varlen(given: dict[str, Any]) -> bool:
    config, device = given.get("config"), torch.device(given["device"])
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else given.get("dtype")
    width = head_width(config)
    half = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    return half and width % 8 == 0 and 0 < width <= 256


def head_width(config: Any) -> int:
    """Return the size of a head; 0 if the config does not say."""
    width = getattr(config, "head_dim", None)
    heads, hidden = (getattr(config, name, None) for name in ("num_attention_heads", "hidden_size"))
    return int(width or (hidden // heads if heads and hidden else 0))


def read_mask_function(function: Callable[..., Any] | None) -> MaskParts | None:
    """Return the parts of a mask function of `transformers`; None if one of them is not known here."""
    from transformers import masking_utils

    leaves = _leaves(function)
    names = [getattr(leaf, "__qualname__", "") for leaf in leaves]
    window: int | None = None
    documents: Tensor | None = None
    for leaf, name in zip(leaves, names, strict=True):
        if leaf is masking_utils.causal_mask_function:
            continue
        if getattr(leaf, "__module__", None) != masking_utils.__name__:
            return None
        if name == "sliding_window_overlay.<locals>.inner_mask" and window is None:
            window = _cell(leaf, "sliding_window", int)
        elif name == "packed_sequence_mask_function.<locals>.inner_mask" and documents is None:
            documents = _cell(leaf, "packed_sequence_mask", Tensor)
        else:
            return None
    if masking_utils.causal_mask_function not in leaves:
        return None
    if len(leaves) != 1 + (window is not None) + (documents is not None):
        return None
    return MaskParts(window, documents)


def _leaves(function: Any) -> list[Any]:
    """Return the functions whose conjunction a mask function is; itself if it is no conjunction."""
    if getattr(function, "__qualname__", "") != "and_masks.<locals>.and_mask":
        return [function]
    members = _cell(function, "mask_functions", tuple)
    return [function] if members is None else [leaf for member in members for leaf in _leaves(member)]


def _cell(function: Any, name: str, kind: type) -> Any:
    """Return a variable that a function closes over; None if it has no variable of that name and kind."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    found = cells[name].cell_contents if name in cells else None
    return found if isinstance(found, kind) else None


def _is_zero(given: dict[str, Any], name: str) -> bool:
    found = given.get(name, 0)
    return isinstance(found, int) and found == 0
