"""Which kernels of the decode step run."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from piledriver.kernels.attention import ScoreOptions
from piledriver.kernels.decode.step import StepTensors
from piledriver.kernels.paged_attention import PagedBatch, Rotation, paged_attention
from piledriver.kernels.registry import fastest_kernel


def gather_step(
    fields: Tensor, last_tokens: Tensor, tables: Tensor, size: int, *, rows: int, width: int
) -> StepTensors:
    """Return the inputs of the first `rows` sequences of a decode step, with `width` blocks of `size` tokens each.

    `fields` ([4 or more, capacity] int32) holds the token, the slot whose last sampled token replaces it (-1 for none),
    the position and the row of `tables` of each sequence.
    """
    kernel: Any = fastest_kernel("decode", fields.device)
    out: StepTensors = kernel.gather_step(fields, last_tokens, tables, size, rows=rows, width=width)
    return out


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight of [rows, dim], reduced in fp32."""
    kernel: Any = fastest_kernel("decode", x.device)
    out: Tensor = kernel.rms_norm(x, weight, eps)
    return out


def rotate_and_store(
    projected: Tensor, keys: Tensor, values: Tensor, positions: Tensor, slots: Tensor, rotation: Rotation
) -> Tensor:
    """Split [tokens, kv_heads * (group + 2) * head_dim], rotate, store keys and values in their pages.

    Returns the queries, [tokens, kv_heads * group, head_dim].
    """
    kernel: Any = fastest_kernel("decode", projected.device)
    out: Tensor = kernel.rotate_and_store(projected, keys, values, positions, slots, rotation)
    return out


def rotate_and_attend(
    projected: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    positions: Tensor,
    rotation: Rotation,
    scores: ScoreOptions,
) -> Tensor:
    """Return the attention of a projection [tokens, kv_heads * (group + 2) * head_dim] of queries, keys and values.

    Queries and keys are normalised and rotated, new keys and values stored: in one kernel with the attention where it
    does so and each sequence has one new token.
    """
    kernel: Any = fastest_kernel("paged_attention", projected.device)
    if kernel.rotates(projected, keys, batch, scores, rotation):
        out: Tensor = kernel(projected, keys, values, batch, scores, rotation=rotation)
        return out
    queries = rotate_and_store(projected, keys, values, positions, batch.slots, rotation)
    return paged_attention(queries, keys, values, batch, scores)
