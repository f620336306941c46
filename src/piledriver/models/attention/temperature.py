"""Attention temperature (Llama 4): queries grow with the logarithm of their position in blocks without rotation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from piledriver.models.config import ModelConfig


class QueryTemperature(nn.Module):
    """1 + scale * log(1 + floor((position + 1) / positions)), a factor of queries."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.scale, self.positions = config.temperature_scale, config.temperature_positions

    def forward(self, length: int, positions: Tensor | None, device: torch.device) -> Tensor:
        """Return [1, length, 1] from position 0, or [batch, length, 1] of the given positions, in fp32."""
        places = torch.arange(length, device=device).unsqueeze(0) if positions is None else positions
        steps = torch.floor((places.float() + 1.0) / self.positions)
        return (1.0 + self.scale * torch.log1p(steps)).unsqueeze(-1)
