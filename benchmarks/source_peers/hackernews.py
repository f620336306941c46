"""What the original used for HackerNews: json, and html2text without wrapping for each text."""

from __future__ import annotations

import json

# The samples are a handful of items; the text of a comment is what costs, so one is repeated as a thread.
CASES = ["hackernews/21500985.json"]


def peer(content: bytes) -> str:
    import html2text

    converter = html2text.HTML2Text()
    converter.body_width = 0
    item = json.loads(content)
    return f"{item.get('by', '')}\n{converter.handle(item.get('text', ''))}"
