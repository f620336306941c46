"""The entities of an XML attribute: tables of posts have values that are whole pages."""

from __future__ import annotations

import html

from piledriver.corpus.formats.html.fast.convert import in_use

_NAMES = {b"&lt;": b"<", b"&gt;": b">", b"&quot;": b'"', b"&apos;": b"'", b"&#xA;": b"\n", b"&#xD;": b"\r"}
_AMP = b"&amp;"
# Shorter values are done before compiled code is called.
_LONG = 200


def unescaped(value: bytes) -> bytes:
    """The value that was meant.

    >>> unescaped(b"a &lt;b&gt; &amp;amp; &#xE9;").decode()
    'a <b> &amp; é'
    """
    if len(value) >= _LONG and in_use():
        from piledriver.corpus.formats.xml.unescape_scan import replaced

        content = replaced(value)
        if content is not None:
            return content
    elif value.count(b"&") == sum(map(value.count, _NAMES)) + value.count(_AMP):
        for name, mark in _NAMES.items():
            value = value.replace(name, mark)
        return value.replace(_AMP, b"&")
    # Characters by their numbers are rare.
    return html.unescape(value.decode("utf-8", "replace")).encode("utf-8", "replace")
