"""`WindowBatch`: windows of tokens as numpy arrays, with the starts of their documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IGNORED = -100
"""Label of padding, which torch's cross-entropy ignores."""


@dataclass(frozen=True)
class WindowBatch:
    """Windows of tokens with their labels.

    A document begins with the boundary token, and the label of its last token is the next boundary token. With a
    document mask, every token of every document is thus predicted once, the first one from the boundary token.
    """

    inputs: npt.NDArray[Any]
    """(windows, seq_len) ids."""
    labels: npt.NDArray[Any]
    """(windows, seq_len) the id that follows each input; `used` says where padding begins."""
    used: npt.NDArray[np.int64] | None
    """Tokens in each window before its padding; None if every window is full."""
    starts: npt.NDArray[np.int64]
    """Start of each document, or part of one, in the flattened inputs; every window starts one."""

    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """Return cumulative document lengths in the flattened batch, as variable-length attention takes them."""
        return np.append(self.starts, self.inputs.size).astype(np.int32)

    def document_ids(self) -> npt.NDArray[np.int32]:
        """Return (windows, seq_len) document numbers: tokens attend to each other if theirs are equal."""
        marks = np.zeros(self.inputs.size, np.int32)
        marks[self.starts] = 1
        return (np.cumsum(marks, dtype=np.int32) - 1).reshape(self.inputs.shape)

    def positions(self) -> npt.NDArray[np.int32]:
        """Return (windows, seq_len) the position of each token in its document."""
        lengths = np.diff(np.append(self.starts, self.inputs.size))
        flat = np.arange(self.inputs.size, dtype=np.int64) - np.repeat(self.starts, lengths)
        return flat.astype(np.int32).reshape(self.inputs.shape)

    def loss_mask(self) -> npt.NDArray[np.bool_]:
        """Return (windows, seq_len): false for padding."""
        if self.used is None:
            return np.ones(self.inputs.shape, np.bool_)
        return np.arange(self.inputs.shape[1])[None, :] < self.used[:, None]
