"""`Windows`: a batch of windows as arrays, and where in it documents begin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IGNORED = -100
"""The label of padding: what torch's cross entropy leaves out."""


@dataclass(frozen=True)
class Windows:
    """Windows of tokens, each token with the one that follows it in its document or text.

    A document begins with the boundary token and ends where the next boundary token would stand, so inside a document
    mask every token of every document is predicted, the first one from the boundary token.
    """

    inputs: npt.NDArray[Any]
    """(windows, seq_len) ids."""
    labels: npt.NDArray[Any]
    """(windows, seq_len) the id that follows each input; padding is told by `used`."""
    used: npt.NDArray[np.int64] | None
    """Tokens in each window before its padding; None where every window is full."""
    starts: npt.NDArray[np.int64]
    """Where each document, or part of one, begins in the flattened inputs; each window begins one."""

    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """The edges of the documents in the flattened batch, as variable-length attention takes them."""
        return np.append(self.starts, self.inputs.size).astype(np.int32)

    def document_ids(self) -> npt.NDArray[np.int32]:
        """(windows, seq_len) a number per document: tokens may attend to each other where theirs are equal."""
        marks = np.zeros(self.inputs.size, np.int32)
        marks[self.starts] = 1
        return (np.cumsum(marks, dtype=np.int32) - 1).reshape(self.inputs.shape)

    def positions(self) -> npt.NDArray[np.int32]:
        """(windows, seq_len) each token's place in its document."""
        lengths = np.diff(np.append(self.starts, self.inputs.size))
        flat = np.arange(self.inputs.size, dtype=np.int64) - np.repeat(self.starts, lengths)
        return flat.astype(np.int32).reshape(self.inputs.shape)

    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """(windows, seq_len) False for padding."""
        if self.used is None:
            return np.ones(self.inputs.shape, np.bool_)
        return np.arange(self.inputs.shape[1])[None, :] < self.used[:, None]


def row_starts(rows: int, seq_len: int) -> npt.NDArray[np.int64]:
    """Where each window begins in the flattened inputs."""
    return np.arange(0, rows * seq_len, seq_len, dtype=np.int64)
