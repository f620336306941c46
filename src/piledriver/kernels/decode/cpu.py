"""The elementwise parts of a decode step on a CPU in fp32, with few operators: each one costs microseconds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from piledriver.kernels.decode.reference import ReferenceDecode
from piledriver.kernels.paged_attention import Rotation


class _Step(NamedTuple):
    """What the layers of a step share, and the tensors it was made of."""

    made_of: tuple[Tensor, Tensor, Tensor]
    shape: torch.Size
    cos: Tensor
    sin: Tensor
    """[tokens, 1, 1, 2, half]: sines of the first half are negative."""
    rows: Tensor
    """[tokens * kv_heads] int64: rows of the pages that new keys and values are written to."""


class CpuDecode(ReferenceDecode):
    """The formulas, in place where possible; other dtypes as the reference."""

    devices = frozenset({"cpu"})

    def __init__(self) -> None:
        self._step: _Step | None = None

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        if x.dtype != torch.float32 or weight is None or weight.dtype != torch.float32:
            return super().rms_norm(x, weight, eps)
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = scale.mul_(scale).mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        return torch.mul(x, scale).mul_(weight)

    def rotate_and_store(
        self, projected: Tensor, keys: Tensor, values: Tensor, positions: Tensor, slots: Tensor, rotation: Rotation
    ) -> Tensor:
        group, table = rotation.group, rotation.table
        if table is None or rotation.has_norm or not projected.dtype == keys.dtype == table.dtype == torch.float32:
            return super().rotate_and_store(projected, keys, values, positions, slots, rotation)
        tokens, dim = projected.shape[0], keys.shape[-1]
        grouped = projected.view(tokens, -1, group + 2, dim)
        straight = grouped[:, :, : group + 1]  # the queries and their key
        _, _, cos, sin, rows = self._shared(table, positions, slots, keys.shape)
        rotary = 2 * cos.shape[-1]
        halves = torch.unflatten(straight[..., :rotary], -1, (2, -1))
        turned = (halves * cos).addcmul_(halves.flip(-2), sin).flatten(-2)
        if rotary < dim:
            turned = torch.cat((turned, straight[..., rotary:]), dim=-1)
        keys.view(-1, dim).index_copy_(0, rows, turned[:, :, group].reshape(-1, dim))
        values.view(-1, dim).index_copy_(0, rows, grouped[:, :, group + 1].reshape(-1, dim))
        return turned[:, :, :group].reshape(tokens, -1, dim)

    def _shared(self, table: Tensor, positions: Tensor, slots: Tensor, shape: torch.Size) -> _Step:
        """Return the angles and page rows of a step, made once: its layers are called with the same tensors."""
        step, given = self._step, (table, positions, slots)
        if step is None or step.shape != shape or any(a is not b for a, b in zip(step.made_of, given, strict=True)):
            cos, sin = table.index_select(0, positions)[:, None, None, None].chunk(2, dim=-1)
            heads, size = shape[1:3]
            first = slots // size * (heads * size) + slots % size
            rows = (first[:, None] + torch.arange(heads) * size).flatten()
            step = self._step = _Step(given, shape, cos, torch.cat((-sin, sin), dim=-2), rows)
        return step
