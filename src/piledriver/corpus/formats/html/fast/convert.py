"""Text of plain HTML without a tree: posts, comments and chapters made of paragraphs, lists, quotations and code.

Most markup that programs write is well formed and uses few tags. A compiled scanner reads it many times as fast as a
tree can be built and walked. Whatever it is not sure of it leaves to the tree, so that the text is the same either way.
Compiling takes some ten seconds the first time on a machine, and loading what was compiled one: a tree has read a few
files by then, so that the scanner is used only where a source was told that there is much to read (`Source.prepare`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

_in_use = False


def plain_text(content: bytes) -> str | None:
    """The text of markup (as UTF-8); None where only a tree can tell, and where the scanner is not in use.

    >>> compiled()
    >>> plain_text(b"<p>One <b>or</b> two</p><ul><li>x &lt; y</li></ul>")
    'One or two\\n\\n- x < y'
    """
    if not _in_use:
        return None
    import numpy as np

    scan, written, deeper = _kernels()
    marked = np.empty(3 * len(content) + 64, np.uint8)
    length = scan(np.frombuffer(content, np.uint8), marked, np.empty((2 * deeper, 2), np.int64))
    if length < 0:
        return None
    text = np.empty(3 * length + 1024, np.uint8)
    length = written(marked, length, text, np.empty((deeper, 5), np.int64))
    return str(text[:length].data, "utf-8") if length >= 0 else None


def compiled(much: bool = True) -> None:
    """Whether there is so much to read that the scanner is worth compiling; where it is, that is done now."""
    global _in_use
    _in_use = much
    if much:
        plain_text(b"<p>a</p>")


def in_use() -> bool:
    """Whether compiled code is to be used in this process."""
    return _in_use


@functools.cache
def _kernels() -> tuple[Callable[..., int], Callable[..., int], int]:
    from piledriver.corpus.formats.html.fast.lines import DEEPER, written
    from piledriver.corpus.formats.html.fast.scan import scan

    return scan, written, DEEPER
