"""Rotation and storage of projections on a CPU in fp32 by a C kernel, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.decode.cpu import CpuDecode
from piledriver.kernels.native.library import native_library
from piledriver.kernels.native.tensors import is_plain
from piledriver.kernels.paged_attention import Rotation


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
        self, projected: Tensor, keys: Tensor, values: Tensor, positions: Tensor, slots: Tensor, rotation: Rotation
    ) -> Tensor:
        group, table = rotation.group, rotation.table
        if (
            table is None
            or rotation.has_norm
            or torch.is_grad_enabled()
            or not is_plain(projected, table, keys, values)
            or not positions.dtype == slots.dtype == torch.int64
        ):
            return super().rotate_and_store(projected, keys, values, positions, slots, rotation)
        tokens, (_, kv_heads, size, dim) = len(projected), keys.shape
        queries = projected.new_empty(tokens, kv_heads * group, dim)
        positions, slots = positions.contiguous(), slots.contiguous()
        addresses = [x.data_ptr() for x in (projected, table, positions, keys, values, slots, queries)]
        self._function(*addresses, tokens, kv_heads, group, dim, table.shape[-1], size, torch.get_num_threads())
        return queries
