"""The elementwise parts of a decode step on a CPU in fp32, with few operators: each one costs microseconds."""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.decode.reference import ReferenceDecode
from piledriver.kernels.paged_attention import write_pages


class CpuDecode(ReferenceDecode):
    """The formulas, in place where possible; other dtypes as the reference."""

    devices = frozenset({"cpu"})

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
        if table is None or q_norm is not None or projected.dtype != torch.float32:
            return super().rotate_and_store(
                projected, table, positions, keys, values, slots, group=group, q_norm=q_norm, k_norm=k_norm, eps=eps
            )
        tokens, dim = projected.shape[0], keys.shape[-1]
        grouped = projected.view(tokens, -1, group + 2, dim)
        straight = grouped[:, :, : group + 1]  # the queries and their key
        angles = table.index_select(0, positions)[:, None, None]
        half = angles.shape[-1] // 2
        cos, sin = angles[..., :half], angles[..., half:]
        first, second = straight[..., :half], straight[..., half : 2 * half]
        turned = torch.empty(straight.shape, dtype=projected.dtype)
        torch.mul(first, cos, out=turned[..., :half]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=turned[..., half : 2 * half]).addcmul_(first, sin)
        if 2 * half < dim:
            turned[..., 2 * half :] = straight[..., 2 * half :]
        write_pages(keys, values, turned[:, :, group], grouped[:, :, group + 1], slots)
        return turned[:, :, :group].reshape(tokens, -1, dim)
