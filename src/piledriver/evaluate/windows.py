"""Split documents into windows in which every token is scored exactly once, and group windows into batches.

As in lm_perplexity and the evaluation harness: the first window is conditioned on the document boundary token alone;
each later window scores the next tokens, after at least `context` tokens; the last one is filled with earlier tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from piledriver.core.errors import UsageError


@dataclass(frozen=True)
class Window:
    """Inputs and targets of one forward pass, and the index of their document."""

    document: int
    inputs: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    """Same length as the inputs; -100 for inputs that are context only."""


def rolling_windows(document: int, ids: npt.ArrayLike, prefix: int, length: int, context: int = 1) -> Iterator[Window]:
    """Yield the windows of one document.

    >>> [(w.inputs.tolist(), w.targets.tolist()) for w in rolling_windows(0, [5, 6, 7, 8, 9], prefix=0, length=3)]
    [([0, 5, 6], [5, 6, 7]), ([6, 7, 8], [-100, 8, 9])]
    """
    if not 1 <= context <= length:
        raise UsageError(f"a context of {context} tokens does not fit windows of {length}", fix=f"use 1 to {length}")
    # Token i of the document is sequence[i + 1], predicted from sequence[: i + 1].
    sequence = np.concatenate([[prefix], np.asarray(ids, np.int64)])
    total, scored = len(sequence) - 1, 0
    while scored < total:
        fresh = min(total - scored, length if scored == 0 else length - context + 1)
        end = scored + fresh
        begin = max(0, end - length)
        targets = sequence[begin + 1 : end + 1].copy()
        targets[: end - begin - fresh] = -100
        yield Window(document, sequence[begin:end], targets)
        scored = end


def continuation_window(index: int, context: npt.ArrayLike, continuation: npt.ArrayLike, length: int) -> Window:
    """Return a window that scores the continuation only; tokens that do not fit are dropped from the left.

    >>> window = continuation_window(0, [1, 2, 3], [4, 5], length=3)
    >>> window.inputs.tolist(), window.targets.tolist()
    ([2, 3, 4], [-100, 4, 5])
    """
    sequence = np.concatenate([np.asarray(context, np.int64), np.asarray(continuation, np.int64)])
    fresh = min(len(np.asarray(continuation)), length, len(sequence) - 1)
    inputs = np.ascontiguousarray(sequence[:-1][-length:])
    targets = np.full(len(inputs), -100, np.int64)
    targets[len(inputs) - fresh :] = sequence[len(sequence) - fresh :]
    return Window(index, inputs, targets)


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
