"""`Cursor`: the position in the data as 24 bytes, independent of the world size."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from piledriver.core.errors import CorruptFileError

_FORM = struct.Struct("<QQQ")


@dataclass(frozen=True)
class Cursor:
    """The next window; every window before it was read by some rank.

    >>> Cursor.from_bytes(Cursor(seed=7, epoch=1, index=90).to_bytes())
    Cursor(seed=7, epoch=1, index=90)
    """

    seed: int = 0
    """Seed of the shuffle."""
    epoch: int = 0
    """Completed epochs."""
    index: int = 0
    """Windows of the current epoch that were read."""

    def to_bytes(self) -> bytes:
        """Return the cursor as 24 bytes."""
        return _FORM.pack(self.seed, self.epoch, self.index)

    @classmethod
    def from_bytes(cls, saved: bytes) -> Cursor:
        """Return the cursor saved by `to_bytes`."""
        if len(saved) != _FORM.size:
            raise CorruptFileError(
                f"a cursor has {_FORM.size} bytes, this one {len(saved)}", fix="load another checkpoint"
            )
        return cls(*_FORM.unpack(saved))
