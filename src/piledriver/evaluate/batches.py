"""Group windows of different lengths into batches with little padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from piledriver.evaluate.windows import Window


def batches(
    windows: Sequence[Window], batch_tokens: int, device: torch.device
) -> Iterator[tuple[Sequence[Window], Tensor, Tensor]]:
    """Yield windows of similar length, longest first, each batch with its inputs and targets, [batch, time].

    A batch has at most `batch_tokens` with its padding, or one window. Padding is on the right, where a causal model
    does not see it, and its targets are -100.
    """
    ordered = sorted(windows, key=lambda window: -len(window.inputs))
    at = 0
    while at < len(ordered):
        longest = len(ordered[at].inputs)
        batch = ordered[at : at + max(1, batch_tokens // longest)]
        at += len(batch)
        inputs = torch.zeros(len(batch), longest, dtype=torch.long)
        targets = torch.full((len(batch), longest), -100, dtype=torch.long)
        for row, window in enumerate(batch):
            inputs[row, : len(window.inputs)] = torch.from_numpy(window.inputs)
            targets[row, : len(window.targets)] = torch.from_numpy(window.targets)
        yield batch, inputs.to(device), targets.to(device)
