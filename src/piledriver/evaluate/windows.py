"""A document as windows that a model can read, every token scored exactly once.

As in lm_perplexity and the evaluation harness: the first window is conditioned on the token between documents alone;
each later one scores the tokens that follow, with at least `context` tokens before them; the last one is filled up with
earlier tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from piledriver.core.errors import UsageError


@dataclass(frozen=True)
class Window:
    """What the model reads and what it must say: the last `scored` inputs predict the tokens after them."""

    document: int
    inputs: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    """As long as the inputs; -100 where the input is context only."""


def rolling_windows(document: int, ids: npt.ArrayLike, prefix: int, length: int, context: int = 1) -> Iterator[Window]:
    """The windows of one document.

    >>> [(w.inputs.tolist(), w.targets.tolist()) for w in rolling_windows(0, [5, 6, 7, 8, 9], prefix=0, length=3)]
    [([0, 5, 6], [5, 6, 7]), ([6, 7, 8], [-100, 8, 9])]
    """
    if not 1 <= context <= length:
        raise UsageError(f"a context of {context} tokens does not fit windows of {length}", fix=f"use 1 to {length}")
    # The whole sequence with its prefix: token i of the document is sequence[i + 1] and is predicted from sequence[: i
    # + 1].
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
    """One window that scores the continuation only; what does not fit is cut from the left.

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
