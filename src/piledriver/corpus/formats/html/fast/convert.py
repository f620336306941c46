"""Convert plain HTML to text without a tree."""

from __future__ import annotations

import functools
from collections.abc import Callable


def scan_to_text(content: bytes) -> str | None:
    """Return the text of HTML in UTF-8, or `None` for markup that only a tree can read.

    Raises `UnicodeDecodeError` where the content is not UTF-8. The first call on a machine compiles for about ten
    seconds, the first call of a process loads the compiled code in about one; `compile_scanner` does that beforehand.

    >>> scan_to_text(b"<p>One <b>or</b> two</p><ul><li>x &lt; y</li></ul>")
    'One or two\\n\\n- x < y'
    """
    import numpy as np

    scan, write_lines, max_blocks = _kernels()
    marked = np.empty(3 * len(content) + 64, np.uint8)
    length = scan(np.frombuffer(content, np.uint8), marked, np.empty((2 * max_blocks, 2), np.int64))
    if length < 0:
        return None
    text = np.empty(3 * length + 1024, np.uint8)
    length = write_lines(marked, length, text, np.empty((max_blocks, 5), np.int64))
    return str(text[:length].data, "utf-8") if length >= 0 else None


def compile_scanner() -> None:
    """Compile the scanner, or load it from the cache."""
    scan_to_text(b"<p>a</p>")


@functools.cache
def _kernels() -> tuple[Callable[..., int], Callable[..., int], int]:
    from piledriver.corpus.formats.html.fast.lines import DEEPER, write_lines
    from piledriver.corpus.formats.html.fast.scan import scan

    return scan, write_lines, DEEPER
