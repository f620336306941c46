"""The elementwise parts of a decode step on a CPU in fp32, with few operators: each one costs microseconds."""

from __future__ import annotations

import torch
from torch import Tensor

from piledriver.kernels.decode.reference import ReferenceDecode
from piledriver.kernels.paged_attention import write_pages


class CpuDecode(ReferenceDecode):
    """The formulas, in place where possible; other dtypes as the reference."""

    devices = frozenset({"cpu"})

    def __init__(self) -> None:
        self._angles: tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor]]
        self._angles = None, (torch.empty(0), torch.empty(0))

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
        cos, sin = self._angles_at(table, positions)
        rotary = 2 * cos.shape[-1]
        halves = torch.unflatten(straight[..., :rotary], -1, (2, -1))
        turned = (halves * cos).addcmul_(halves.flip(-2), sin).flatten(-2)
        if rotary < dim:
            turned = torch.cat((turned, straight[..., rotary:]), dim=-1)
        write_pages(keys, values, turned[:, :, group], grouped[:, :, group + 1], slots)
        return turned[:, :, :group].reshape(tokens, -1, dim)

    def _angles_at(self, table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines of both halves, made once for the layers of a step."""
        of, found = self._angles
        if of is None or of[0] is not table or of[1] is not positions:
            cos, sin = table.index_select(0, positions)[:, None, None, None].chunk(2, dim=-1)
            found = cos, torch.cat((-sin, sin), dim=-2)
            self._angles = (table, positions), found
        return found
