"""Write new keys and values to their pages; attend with the fastest kernel that runs on the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from piledriver.kernels.decode.dispatch import rotate_and_store
from piledriver.kernels.paged_attention.batch import PagedBatch, Rotation, as_bytes
from piledriver.kernels.registry import fastest_kernel


def write_pages(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Store [tokens, kv_heads, head_dim] in [blocks, kv_heads, block_size, head_dim] pages at the given slots."""
    size = keys.shape[2]
    blocks, offsets = slots // size, slots % size
    for pages, new in ((keys, k), (values, v)):
        raw = as_bytes(pages)
        raw[blocks, :, offsets] = as_bytes(new.to(pages.dtype)) if raw is not pages else new.to(pages.dtype)


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention of [tokens, heads, head_dim] queries over the pages of their own sequences, causally.

    `slopes` ([heads]) are ALiBi's; `sinks` ([heads]) are logits that take part in the softmax without a value.
    """
    kernel: Any = fastest_kernel("paged_attention", q.device)
    out: Tensor = kernel(
        q, keys, values, batch, scale=scale, window=window, softcap=softcap, slopes=slopes, sinks=sinks
    )
    return out


def rotate_and_attend(
    projected: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    positions: Tensor,
    rotation: Rotation,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the attention of a projection [tokens, kv_heads * (group + 2) * head_dim] of queries, keys and values.

    Queries and keys are normalised and rotated, new keys and values stored: in one kernel with the attention where it
    does so and each sequence has one new token.
    """
    kernel: Any = fastest_kernel("paged_attention", projected.device)
    changes: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    # The sum of a norm has an order of its own in each kernel.
    alike = rotation.q_norm is None or not batch.invariant
    if kernel.rotates and batch.max_new == 1 and alike:
        out: Tensor = kernel(projected, keys, values, batch, rotation=rotation, **changes)
        return out
    queries = rotate_and_store(
        projected,
        rotation.table,
        positions,
        keys,
        values,
        batch.slots,
        group=rotation.group,
        q_norm=rotation.q_norm,
        k_norm=rotation.k_norm,
        eps=rotation.eps,
    )
    return paged_attention(queries, keys, values, batch, **changes)
