"""The field's best extractor of the content of a page in Python: trafilatura."""

from __future__ import annotations

CASES = [
    *("openwebtext2/ebb-org/source.html", "openwebtext2/firefox-nightly-blog/source.html"),
    *("openwebtext2/v8-blog/source.html", "openwebtext2/mercurial/source.html", "openwebtext2/wikipedia/source.html"),
]


def peer(content: bytes) -> str:
    import trafilatura

    return trafilatura.extract(content) or ""
