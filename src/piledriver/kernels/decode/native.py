"""Rotation and storage of projections on a CPU in fp32 by a C kernel, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.decode.cpu import CpuDecode
from piledriver.kernels.native.library import native_library


class NativeDecode(CpuDecode):
    """`CpuDecode` with rotation and storage in C."""

    def __init__(self) -> None:
        super().__init__()
        library = native_library()
        assert library is not None, "ask `runs_on` first"
        self._function = library.piledriver_rotate_and_store

    @classmethod
    def runs_on(cls, device: torch.device) -> bool:
        """Return whether the device is a CPU, and C kernels can be compiled."""
        return super().runs_on(device) and native_library() is not None

    def rotate_and_store(
        self,
        projected: Tensor,
        table: Tensor | None,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        *,
        group: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        plain = q_norm is None and k_norm is None and table is not None and not torch.is_grad_enabled()
        same = projected.dtype == keys.dtype == torch.float32 and positions.dtype == slots.dtype == torch.int64
        if not (plain and same and table is not None and table.dtype == torch.float32):
            return super().rotate_and_store(
                projected, table, positions, keys, values, slots, group=group, q_norm=q_norm, k_norm=k_norm, eps=eps
            )
        tokens, (_, kv_heads, size, dim) = len(projected), keys.shape
        queries = projected.new_empty(tokens, kv_heads * group, dim)
        read = [tensor.contiguous() for tensor in (projected, table, positions, slots)]
        addresses = [tensor.data_ptr() for tensor in (*read[:3], keys, values, read[3], queries)]
        self._function(*addresses, tokens, kv_heads, group, dim, table.shape[-1], size, torch.get_num_threads())
        return queries
