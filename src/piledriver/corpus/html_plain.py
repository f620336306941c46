"""Text of plain HTML without a tree: posts, comments and chapters made of paragraphs, lists, quotations and code.

Most markup that programs write is well formed and uses few tags. A compiled scanner reads it many times as fast as a
tree can be built and walked. Whatever it is not sure of it leaves to the tree, so that the text is the same either way.
"""

from __future__ import annotations

import functools


def plain_text(content: bytes) -> str | None:
    """The text of markup (as UTF-8); None where only a tree can tell.

    >>> plain_text(b"<p>One <b>or</b> two</p><ul><li>x &lt; y</li></ul>")
    'One or two\\n\\n- x < y'
    """
    import numpy as np

    from piledriver.corpus.html_marks import written
    from piledriver.corpus.html_scan import scan

    marked = np.empty(3 * len(content) + 64, np.uint8)
    length = scan(np.frombuffer(content, np.uint8), marked, np.empty((64, 2), np.int64), np.empty((64, 2), np.int64))
    if length < 0:
        return None
    text = np.empty(3 * length + 1024, np.uint8)
    length = written(marked, length, text, np.empty((64, 4), np.int64), np.empty(64, np.int64))
    return str(text[:length].data, "utf-8") if length >= 0 else None


@functools.cache
def compiled() -> None:
    """Compile the scanner, which takes some seconds the first time on a machine."""
    plain_text(b"<p>a</p>")
