"""Text of plain HTML without a tree: posts, comments and chapters made of paragraphs, lists, quotations and code.

Most markup that programs write is well formed and uses few tags. A compiled scanner reads it many times as fast as a
tree can be built and walked. Whatever it is not sure of it leaves to the tree, so that the text is the same either way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable


def plain_text(content: bytes, classes_hide: Callable[[bytes], object]) -> str | None:
    """The text of markup (as UTF-8); None where only a tree can tell.

    `classes_hide` is asked whether any class may hide text, where there are classes at all.

    >>> plain_text(b"<p>One <b>or</b> two</p><ul><li>x &lt; y</li></ul>", lambda _: False)
    'One or two\\n\\n- x < y'
    """
    import numpy as np

    from piledriver.corpus.html_marks import written
    from piledriver.corpus.html_scan import HAS_CLASSES, scan

    raw = np.frombuffer(content, np.uint8)
    length, marked = scan(raw, False)
    if length == HAS_CLASSES and not classes_hide(content):
        length, marked = scan(raw, True)
    if length < 0:
        return None
    length, text = written(marked, length)
    return text[:length].tobytes().decode("utf-8") if length >= 0 else None


@functools.cache
def compiled() -> None:
    """Compile the scanner, which takes some seconds the first time on a machine."""
    plain_text(b"<p>a</p>", lambda _: False)
