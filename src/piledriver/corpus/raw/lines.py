"""Lines of a stream of any size in bounded memory; too long a line is skipped and reported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

from piledriver.corpus.document import Refusal

MAX_LINE_BYTES = 1 << 26
_BLOCK_BYTES = 1 << 18


def bounded_lines(stream: BinaryIO, origin: str, max_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes | Refusal]:
    """Yield each line with its newline, or a refusal in place of one longer than the limit.

    >>> import io
    >>> found = bounded_lines(io.BytesIO(b"a\\nbbbb\\nc"), "f", 3)
    >>> [line if isinstance(line, bytes) else line.origin for line in found]
    [b'a\\n', 'f#2', b'c']
    """
    number = 0
    # The parts of a line that spans blocks, joined once; `skipped` where it is already too long.
    parts: list[bytes] = []
    held, skipped = 0, False
    while block := stream.read(_BLOCK_BYTES):
        *lines, rest = block.split(b"\n")
        for line in lines:
            number += 1
            if parts:
                line = b"".join((*parts, line))
                parts, held = [], 0
            if skipped or len(line) >= max_bytes:
                yield Refusal("line too long", f"{origin}#{number}", f"more than {max_bytes} bytes")
                skipped = False
            else:
                yield line + b"\n"
        if skipped:
            continue
        if rest:
            parts.append(rest)
            held += len(rest)
        if held > max_bytes:
            parts, held, skipped = [], 0, True
    if skipped or held >= max_bytes:
        yield Refusal("line too long", f"{origin}#{number + 1}", f"more than {max_bytes} bytes")
    elif parts:
        yield b"".join(parts)
