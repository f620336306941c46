"""What the original used for HackerNews: json, and html2text without wrapping for each text.

No sample file holds a whole thread, so `made` makes one of the size of a busy one from the text of real comments.
"""

from __future__ import annotations

import json

CASES: list[str] = []
COMMENT = (
    "Not to totally change the subject, but...<p>...can we talk about <i>the other thing</i>? See "
    '<a href="https:&#x2F;&#x2F;example.com&#x2F;page" rel="nofollow">https:&#x2F;&#x2F;example.com&#x2F;page</a>.'
    "<p>Can that be what this thread is now about? I find it fascinating which instances get the press excited enough "
    "to report, and which the press just buries.<p><pre><code>  def f(x):\n      return x + 1\n</code></pre>"
)


def made(comments: int = 500) -> dict[str, bytes]:
    """A nested item as Algolia gives it; every comment answers the story."""
    replies = [
        {"id": n, "type": "comment", "author": "b", "text": COMMENT, "parent_id": 1} for n in range(2, comments + 2)
    ]
    story = {"id": 1, "type": "story", "author": "a", "title": "T", "points": 9, "children": replies}
    return {"1.json": json.dumps(story).encode()}


def peer(content: bytes) -> str:
    import html2text

    converter = html2text.HTML2Text()
    converter.body_width = 0
    story = json.loads(content)
    comments = (f"{item['author']}\n{converter.handle(item['text'])}" for item in story["children"])
    return f"{story['title']} - {story['author']}\n======\n" + "------\n".join(comments)
