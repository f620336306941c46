"""Paged attention on a CPU, where each sequence has one new token, by a C kernel that rotates, stores and attends."""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.attention import ScoreOptions
from piledriver.kernels.native.library import native_library
from piledriver.kernels.native.steps import MOST_QUERY, WIDEST, AttentionStep
from piledriver.kernels.native.tensors import is_plain
from piledriver.kernels.paged_attention.batch import PagedBatch, Rotation
from piledriver.kernels.paged_attention.cpu import CpuPagedAttention


class NativePagedAttention(CpuPagedAttention):
    """Decode steps by the C kernel, others as `CpuPagedAttention`."""

    def __init__(self) -> None:
        super().__init__()
        library = native_library()
        assert library is not None, "ask `runs_on` first"
        self._function = library.piledriver_attend

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """Return whether the device is a CPU, and C kernels can be compiled."""
        return super().runs_on(device) and native_library() is not None

    def rotates(
        self, projected: Tensor, keys: Tensor, batch: PagedBatch, scores: ScoreOptions, rotation: Rotation
    ) -> bool:
        if batch.invariant or batch.max_new > 1 or len(batch.spans) != len(batch.slots) or torch.is_grad_enabled():
            return False
        plain = scores.softcap is None and scores.slopes is None and scores.sinks is None and not rotation.has_norm
        dim = keys.shape[-1]
        fits = dim % WIDEST == 0 and rotation.group * dim <= MOST_QUERY
        return plain and fits and is_plain(projected, keys, rotation.table)

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: PagedBatch,
        scores: ScoreOptions,
        *,
        rotation: Rotation | None = None,
    ) -> Tensor:
        if rotation is None:
            return super().__call__(q, keys, values, batch, scores)
        _, kv_heads, size, dim = keys.shape
        rows, group, table, threads = len(q), rotation.group, rotation.table, torch.get_num_threads()
        longest = max(context for _, context in batch.spans)
        out, buffer = q.new_empty(rows, kv_heads * group, dim), q.new_empty(threads, group, longest)
        tables = batch.tables.contiguous()
        step = AttentionStep(
            *(q.data_ptr(), None if table is None else table.data_ptr(), keys.data_ptr(), values.data_ptr()),
            *(buffer.data_ptr(), out.data_ptr(), batch.slots.data_ptr(), tables.data_ptr(), batch.contexts.data_ptr()),
            *(rows, kv_heads, group, dim, 0 if table is None else table.shape[-1], size, tables.shape[1]),
            *(scores.window or 0, longest, scores.scale, threads),
        )
        self._function(step)
        return out
