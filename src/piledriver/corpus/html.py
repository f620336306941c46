"""HTML to readable text: fragments (posts, comments, chapters) whole, pages without their boilerplate."""

from __future__ import annotations

from resiliparse.extract.html2text import extract_plain_text


def fragment_to_text(html: str) -> str:
    """All the visible text of a piece of HTML, with paragraphs, lists and preformatted text as a reader sees them."""
    text: str = extract_plain_text(html, preserve_formatting=True, links=False, list_bullets=True)
    return text


def page_to_text(html: str) -> str:
    """The main content of a web page: no navigation, no advertisements, no footers."""
    text: str = extract_plain_text(html, preserve_formatting=True, main_content=True, links=False, list_bullets=True)
    return text
