"""All blocks of a Llama-like model for one new token of a few sequences on a CPU in fp32, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from piledriver.kernels.native.library import native_library
from piledriver.kernels.native.steps import (
    CHUNK,
    LEAST_PART,
    MOST_QUERY,
    MOST_ROWS,
    WIDEST,
    AttentionStep,
    BlockAddresses,
    DecodeStep,
)
from piledriver.kernels.native.tensors import fits_native_weight, is_plain, weight_address
from piledriver.kernels.paged_attention.batch import PagedBatch
from piledriver.kernels.quantised_weight import QuantisedWeight


class DecodeBlock(NamedTuple):
    """Weights and pages of one block; rows of `qkv` and `gate_up` as in `Rotation` and `linear`."""

    qkv: Tensor | QuantisedWeight
    out: Tensor | QuantisedWeight
    gate_up: Tensor | QuantisedWeight
    down: Tensor | QuantisedWeight
    attention_norm: Tensor
    qkv_bias: Tensor | None
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    keys: Tensor
    values: Tensor
    window: int | None
    gate_block: int

    @property
    def matrices(self) -> tuple[Tensor | QuantisedWeight, ...]:
        """Weights, in the order of `BlockAddresses`."""
        return self[:4]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """Norms, biases and pages, in the order of `BlockAddresses`."""
        return self[4:12]


def fits_native_decode(blocks: Sequence[DecodeBlock], table: Tensor, group: int) -> bool:
    """Return whether C kernels can be compiled, and cover these blocks, all of which must have the same shapes."""
    if native_library() is None or not all(is_plain(table, *block.tensors) for block in blocks):
        return False
    if not all(_is_readable(weight) for block in blocks for weight in block.matrices):
        return False
    pages, (dim, mlp_dim) = blocks[0].keys.shape, blocks[0].down.shape
    _, kv_heads, _, head_dim = pages
    mixed, projected = kv_heads * group * head_dim, kv_heads * (group + 2) * head_dim
    weights = (projected, dim), (dim, mixed), (2 * mlp_dim, dim), (dim, mlp_dim)
    vectors = (dim,), (projected,), (dim,), (dim,), (2 * mlp_dim,), (dim,)
    wanted = (*weights, *vectors, pages, pages)
    return (
        head_dim % WIDEST == 0
        and group * head_dim <= MOST_QUERY
        and table.shape[-1] <= head_dim
        and all(mlp_dim % block.gate_block == 0 for block in blocks)
        and all(
            x is None or x.shape == shape
            for block in blocks
            for x, shape in zip((*block.matrices, *block.tensors), wanted, strict=True)
        )
    )


def fits_native_step(batch: PagedBatch) -> bool:
    """Return whether a step is one new token of each of a few sequences."""
    few = batch.max_new == 1 and len(batch.slots) == len(batch.spans) <= MOST_ROWS
    return few and not batch.invariant and not torch.is_grad_enabled()


def native_decode(
    x: Tensor,
    blocks: Sequence[DecodeBlock],
    batch: PagedBatch,
    table: Tensor,
    *,
    group: int,
    scale: float,
    eps: float,
) -> Tensor:
    """Return [rows, dim] after all blocks, in place of x; new keys and values are stored in the pages.

    Each row is one new token of a sequence of `batch`. `table` ([positions, rotary_dim]) holds cosines, then sines.
    """
    library = native_library()
    assert library is not None, "ask `fits_native_decode` first"
    rows, dim = x.shape
    _, kv_heads, size, head_dim = blocks[0].keys.shape
    threads, mlp_dim = torch.get_num_threads(), blocks[0].down.shape[1]
    longest = max(context for _, context in batch.spans)
    widths = kv_heads * (group + 2) * head_dim, kv_heads * group * head_dim, mlp_dim
    projected, mixed, gated = (x.new_empty(rows, width) for width in widths)
    arranged = x.new_empty(rows, max(dim, *widths) + WIDEST)
    # On some machines that many rows are several parts, for which codes are decoded once.
    decoded = x.new_empty(threads * CHUNK * max(dim, *widths[1:]) if rows > LEAST_PART else 0)
    scores = x.new_empty(threads, group, longest)
    tables = batch.tables.contiguous()
    attention = AttentionStep(
        *(projected.data_ptr(), table.data_ptr(), None, None, scores.data_ptr(), mixed.data_ptr()),
        *(batch.slots.data_ptr(), tables.data_ptr(), batch.contexts.data_ptr()),
        *(rows, kv_heads, group, head_dim, table.shape[1], size, tables.shape[1], 0, longest, scale, threads),
    )
    step = DecodeStep(
        (BlockAddresses * len(blocks))(*map(_addresses, blocks)),
        *(tensor.data_ptr() for tensor in (x, projected, mixed, gated, arranged, decoded)),
        *(len(blocks), dim, mlp_dim, eps, attention),
    )
    library.piledriver_decode(step)
    return x


def _addresses(block: DecodeBlock) -> BlockAddresses:
    pointers = (None if tensor is None else tensor.data_ptr() for tensor in block.tensors)
    return BlockAddresses(*map(weight_address, block.matrices), *pointers, block.window or 0, block.gate_block)


def _is_readable(weight: Tensor | QuantisedWeight) -> bool:
    return fits_native_weight(weight) and (isinstance(weight, Tensor) or weight.scales.dtype == torch.float32)
