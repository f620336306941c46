"""`Cursor`: where in the data we are, in 24 bytes, whatever the number of processes."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from piledriver.core.errors import CorruptFileError

_FORM = struct.Struct("<QQQ")


@dataclass(frozen=True)
class Cursor:
    """The next window: all windows before it, of all processes together, were taken.

    >>> Cursor.from_bytes(Cursor(seed=7, epoch=1, index=90).to_bytes())
    Cursor(seed=7, epoch=1, index=90)
    """

    seed: int = 0
    """Which order."""
    epoch: int = 0
    """How many whole epochs were taken."""
    index: int = 0
    """How many windows of this epoch were taken."""

    def to_bytes(self) -> bytes:
        """The 24 bytes to save."""
        return _FORM.pack(self.seed, self.epoch, self.index)

    @classmethod
    def from_bytes(cls, saved: bytes) -> Cursor:
        """A cursor that was saved."""
        if len(saved) != _FORM.size:
            raise CorruptFileError(f"a cursor is {_FORM.size} bytes, not {len(saved)}", fix="load another checkpoint")
        return cls(*_FORM.unpack(saved))
