"""The elementwise parts of a decode step in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from piledriver.kernels.decode.step import StepTensors
from piledriver.kernels.paged_attention import Rotation, write_pages
from piledriver.kernels.registry import Kernel


class ReferenceDecode(Kernel):
    """The formulas."""

    def gather_step(
        self, fields: Tensor, last_tokens: Tensor, tables: Tensor, size: int, *, rows: int, width: int
    ) -> StepTensors:
        given, source, positions, owners = fields[:4, :rows].long()
        tokens = torch.where(source >= 0, last_tokens[source.clamp(min=0)], given)
        blocks = tables[owners, :width]
        slots = blocks.gather(1, (positions // size)[:, None])[:, 0].long() * size + positions % size
        return StepTensors(tokens, positions, (positions + 1).int(), slots, blocks)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), None if weight is None else weight.float(), eps).to(x.dtype)

    def rotate_and_store(
        self, projected: Tensor, keys: Tensor, values: Tensor, positions: Tensor, slots: Tensor, rotation: Rotation
    ) -> Tensor:
        group, table, q_norm, k_norm, eps = rotation
        tokens, dim = projected.shape[0], keys.shape[-1]
        grouped = projected.view(tokens, -1, group + 2, dim)
        q, k, v = torch.split(grouped, [group, 1, 1], dim=2)
        q, k, v = q.reshape(tokens, -1, dim), k.squeeze(2), v.squeeze(2)
        if q_norm is not None:
            q = self.rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = self.rms_norm(k, k_norm, eps)
        if table is not None:
            rows = table[positions]
            q, k = _rotate(q, rows), _rotate(k, rows)
        write_pages(keys, values, k, v, slots)
        return q


def _rotate(x: Tensor, rows: Tensor) -> Tensor:
    half = rows.shape[-1] // 2
    cos, sin = rows[:, None, :half], rows[:, None, half:]
    first, second, rest = torch.split(x.float(), [half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)
