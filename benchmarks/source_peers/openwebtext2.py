"""What the original used for OpenWebText2: Newspaper3k."""

from __future__ import annotations

CASES = [
    *("openwebtext2/ebb-org/source.html", "openwebtext2/firefox-nightly-blog/source.html"),
    *("openwebtext2/v8-blog/source.html", "openwebtext2/mercurial/source.html", "openwebtext2/ietf-1/source.html"),
]


def peer(content: bytes) -> str:
    from newspaper import Article

    article = Article("http://example.com/", fetch_images=False, memoize_articles=False)
    article.set_html(content.decode("utf-8", "replace"))
    article.parse()
    text: str = article.text
    return text
