"""A small model and task that every optimizer can learn."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """An embedding, two matrices and their vectors, with widths that blocks of 64 divide."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Embedding(20, 64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 20, bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[1] ** -0.5)
                elif "norm" not in name:
                    parameter.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.down(torch.relu(self.up(x)))))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """A fixed permutation of the tokens to learn."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(20, (64,), generator=generator)
    return tokens, (tokens * 7 + 3) % 20


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        tokens, targets = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).float(), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
