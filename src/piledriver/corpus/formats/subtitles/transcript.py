"""Parse YouTube's first XML (`<text start="1.5" dur="2">`) by one pattern instead of a tree, for speed.

Files that differ from what the server writes (other attributes, markup inside, odd entities, other encodings) are left
to the parser, whose result for the plain form is the same.
"""

from __future__ import annotations

import re

from piledriver.corpus.formats.subtitles.cues import Cue, lines_of

_HEAD = re.compile(r"(?:<\?xml version=\"1\.0\" encoding=\"(?:utf|UTF)-8\" ?\?>)?\s*<transcript>")
_CUE = re.compile(r'<text start="(\d{1,7}(?:\.\d{1,9})?)" dur="(\d{1,7}(?:\.\d{1,9})?)">([^<]*)</text>')
_ALLOWED = bytes((9, 10, *range(32, 256)))
_FORBIDDEN = (b"\xef\xbf\xbe", b"\xef\xbf\xbf", b"]]>")
# Marks other than entities that need cleaning.
_MARKS = ("{", "\\N", "\u200b")
_ENTITIES = (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&apos;", "'"), ("&amp;", "&"))


def plain_transcript(content: bytes) -> list[Cue] | None:
    """Return the cues of a file in the plain form, `None` for any other.

    >>> plain_transcript(b'<transcript><text start="1.5" dur="2">It&amp;#39;s</text></transcript>')
    [Cue(start=1.5, end=3.5, lines=["It's"])]
    """
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    head = _HEAD.match(text)
    if head is None or content.translate(None, _ALLOWED) or any(mark in content for mark in _FORBIDDEN):
        return None
    if text.count("&") != sum(text.count(name) for name, _ in _ENTITIES):
        return None
    found = _CUE.findall(text, head.end())
    # Every bracket must belong to a cue, to the root or to the declaration.
    if text.count("<") != 2 * len(found) + head[0].count("<") + 1 or not text.rstrip().endswith("</transcript>"):
        return None
    marked = any(mark in text for mark in _MARKS)
    cues: list[Cue] = []
    for start, duration, said in found:
        if "&" in said:
            for name, mark in _ENTITIES:
                said = said.replace(name, mark)
            lines = lines_of(said)
        elif marked or "\n" in said:
            lines = lines_of(said)
        else:
            lines = [" ".join(said.split())]
        if lines and lines[0]:
            begin = float(start)
            cues.append(Cue(begin, begin + float(duration), lines))
    return cues
