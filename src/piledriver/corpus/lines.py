"""Lines of a stream of any size, in bounded memory: a line that is too long is skipped and said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from piledriver.corpus.document import Refusal

MAX_LINE_BYTES = 1 << 26


def bounded_lines(stream: BinaryIO, origin: str, max_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes | Refusal]:
    """Each line with its end, or a refusal in the place of one that is longer than the limit.

    >>> import io
    >>> found = bounded_lines(io.BytesIO(b"a\\nbbbb\\nc"), "f", 3)
    >>> [line if isinstance(line, bytes) else line.origin for line in found]
    [b'a\\n', 'f#2', b'c']
    """
    number = 0
    while line := stream.readline(max_bytes):
        number += 1
        if len(line) == max_bytes and not line.endswith(b"\n"):
            while (rest := stream.readline(max_bytes)) and not rest.endswith(b"\n"):
                pass
            yield Refusal("line too long", f"{origin}#{number}", f"more than {max_bytes} bytes")
        else:
            yield line
