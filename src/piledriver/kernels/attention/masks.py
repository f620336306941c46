"""Attention masks in the three forms that kernels read: a dense tensor, document boundaries, a block mask.

`document_ids` are [batch, time] integers, equal and adjacent within a document of a packed row. Two adjacent documents
differ; an id may be used again later in the row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from piledriver.core.errors import UsageError
from piledriver.kernels.attention.kernel import Mask, MaskForm
from piledriver.kernels.torch_private import compiled_block_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def build_mask(
    form: MaskForm,
    length: int,
    device: torch.device,
    document_ids: Tensor | None = None,
    *,
    window: int | None = None,
    slopes: Sequence[float] | None = None,
    max_documents: int | None = None,
) -> Mask:
    """Return the causal mask of rows of `length` tokens in the form that a kernel reads.

    ALiBi `slopes` enter a dense mask only; kernels that read other forms get them as an argument.
    """
    if form == "boundaries":
        if document_ids is None:
            raise UsageError("variable-length attention needs document_ids", fix="pass them, or choose the kernel sdpa")
        return Mask(boundaries=document_boundaries(document_ids, max_documents))
    if form == "block":
        return Mask(block=_block_mask(length, device, document_ids, window))
    if document_ids is None and window is None and slopes is None:
        return Mask()
    places = torch.arange(length, device=device)
    distance = (places[:, None] - places[None, :])[None, None]
    numbers = None if document_ids is None else _document_numbers(document_ids)
    same = None if numbers is None else numbers[:, None, :, None] == numbers[:, None, None, :]
    return Mask(dense=dense_mask(distance, window=window, slopes=slopes, same_document=same))


def dense_mask(
    distance: Tensor,
    *,
    window: int | None = None,
    slopes: Sequence[float] | None = None,
    same_document: Tensor | None = None,
) -> Tensor:
    """Return the mask of [batch or 1, 1, queries, keys] distances: boolean, or additive if there are ALiBi slopes."""
    allowed = distance >= 0
    if window is not None:
        allowed = allowed & (distance < window)
    if same_document is not None:
        allowed = allowed & same_document
    if slopes is None:
        return allowed
    by_head = torch.tensor(slopes, device=distance.device)[None, :, None, None]
    return torch.where(allowed, -by_head * distance, -torch.inf)


def alibi_slopes(heads: int) -> list[float]:
    """Return the ALiBi slope of each head (Press et al., 2021): a geometric series from 2^(-8/heads).

    For head counts that are not powers of two, every second slope of the next power is added.

    >>> alibi_slopes(4)
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-8.0 * (i + 1) / (2 * power)) for i in range(0, 2 * (heads - power), 2)]
    return slopes + between


def positions_in_documents(ids: Tensor) -> Tensor:
    """Return how far each token stands from the start of its document.

    >>> positions_in_documents(torch.tensor([[7, 7, 9, 9, 9]]))
    tensor([[0, 1, 0, 1, 2]])
    """
    places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    starts = torch.where(_starts(ids), places, 0)
    return places - starts.cummax(dim=1).values


def document_boundaries(ids: Tensor, max_documents: int | None = None) -> Tensor:
    """Return where each document begins in the flattened batch, padded with the end to a length that rarely changes.

    >>> document_boundaries(torch.tensor([[7, 7, 9], [1, 1, 1]]), max_documents=4)
    tensor([0, 2, 3, 6, 6], dtype=torch.int32)
    """
    starts = _starts(ids).flatten()
    if max_documents is None:
        # A power of two, so that compiled kernels see few different shapes.
        max_documents = 1 << max(int(starts.sum()) - 1, 1).bit_length()
    tokens = starts.numel()
    document = starts.long().cumsum(0) - 1
    boundaries = torch.full((max_documents + 1,), tokens, dtype=torch.int64, device=ids.device)
    boundaries.scatter_reduce_(0, document, torch.arange(tokens, device=ids.device), "amin")
    return boundaries.int()


def _starts(ids: Tensor) -> Tensor:
    first = torch.ones_like(ids[:, :1], dtype=torch.bool)
    return torch.cat((first, ids[:, 1:] != ids[:, :-1]), dim=1)


def _document_numbers(ids: Tensor) -> Tensor:
    # Ids may repeat later in the row (a document that was cut in two): adjacency decides, not the id.
    return _starts(ids).int().cumsum(dim=1)


def _block_mask(length: int, device: torch.device, ids: Tensor | None, window: int | None) -> BlockMask:
    numbers = None if ids is None else _document_numbers(ids)

    def may_attend(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = query >= key
        if window is not None:
            allowed = allowed & (query - key < window)
        if numbers is not None:
            allowed = allowed & (numbers[batch, query] == numbers[batch, key])
        return allowed

    return compiled_block_mask(may_attend, None if ids is None else ids.shape[0], length, device)
