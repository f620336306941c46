"""HTML to readable text: all of a fragment (post, comment, chapter), the main content of a page.

lxml builds the tree, invisible elements are removed, `main_content.py` selects the content of a page, `render.py`
writes the text.
"""

from __future__ import annotations

import functools
import html as entities
import re
from typing import Any

from lxml import etree

from piledriver.corpus.formats.html.fast.convert import scan_to_text
from piledriver.corpus.formats.html.main_content import main_content
from piledriver.corpus.formats.html.render import render
from piledriver.corpus.formats.html.tags import HEADINGS
from piledriver.corpus.text.data_table import word_set

_TAG = re.compile("</?([a-zA-Z][a-zA-Z0-9]*)[^<>]*>")
_OWN_PARAGRAPH = word_set("p div section article li tr td th h1 h2 h3 h4 h5 h6 pre blockquote dt dd table")
_DEEPEST = 200
_LONGEST_TAG = 20_000
_MOST_ATTRIBUTES = 4_000
_HUGE_TAG = re.compile(rb"(<[a-zA-Z][^\s<>/]{0,100})[^<>]{20000,}")
# Classes of elements that are invisible, or visible but not part of the text (line numbers, edit links), or that draw a
# formula whose source follows.
_UNSEEN_CLASSES = word_set(
    "sr-only visually-hidden visuallyhidden screen-reader-text gutter linenos lineno linenodiv line-numbers"
    " line-numbers-rows rouge-gutter blob-num headerlink anchorjs-link pagenum pageno mw-editsection MathJax_Preview"
    " MathJax MathJax_Display MathJax_SVG MathJax_SVG_Display MathJax_CHTML katex-html"
    " mwe-math-fallback-image-inline mwe-math-fallback-image-display"
)
# Substrings, one of which occurs in any page that uses such a class: fewer strings to search for.
_UNSEEN_HINTS = (
    *(b"sr-only", b"visually", b"screen-reader", b"gutter", b"lineno", b"line-num", b"blob-num", b"editsection"),
    *(b"headerlink", b"anchorjs", b"pagen", b"MathJax", b"katex-html", b"mwe-math-fallback"),
)
_CLASSES = re.compile(rb"class\s{0,9}=\s{0,9}(\"[^\"]*|'[^']*|[^\s<>]*)")
_styled = etree.XPath("//@style/..")
_hidden = etree.XPath("//@hidden/.. | //@aria-hidden/..")
_drawn = etree.XPath("//mjx-math")
_mediawiki_content = etree.XPath("//*[@id='mw-content-text']")
_CONTROL_BYTES = bytes((*range(9), 11, *range(14, 32)))


def fragment_to_text(html: str, *, compiled: bool = False) -> str:
    """Return all visible text of a fragment; `render.py` describes the form of each element.

    `compiled` uses the scanner of `fast/` where it can: the same text, faster after seconds of compiling.

    >>> fragment_to_text("<h2>Area</h2><p>In m<sup>2</sup>&nbsp;&mdash; see:<ol><li>one<ul><li>inner</ul><li>two</ol>")
    '## Area\\n\\nIn m² — see:\\n\\n1. one\\n   - inner\\n2. two'
    """
    return fragment_bytes_to_text(html.encode("utf-8", "replace"), compiled=compiled)


def fragment_bytes_to_text(html: bytes, *, compiled: bool = False) -> str:
    """Return all visible text of a fragment in UTF-8, as `fragment_to_text` does."""
    if b"<" not in html:
        return " ".join(entities.unescape(html.decode("utf-8", "replace")).split())
    if compiled:
        try:
            text = scan_to_text(html)
        except UnicodeDecodeError:
            text = None
        if text is not None:
            return text
    tree = parse_html(html.decode("utf-8", "replace"))
    return "" if tree is None else render(tree)


def parse_html(html: str) -> Any:
    """Return the tree of an HTML text without its invisible elements; `None` where there is no element at all."""
    parser = _parser()
    content = html.encode("utf-8", "replace").translate(None, _CONTROL_BYTES)
    if _may_have_a_huge_tag(content):
        content = _HUGE_TAG.sub(_without_attributes, content)
    tree = etree.fromstring(content, parser)
    if tree is not None and _ends_deep(tree) and _gave_up(parser):
        # libxml2 stops at thousands of nested tags; without the nesting all the text can be read.
        tree = etree.fromstring(_flattened(html).encode("utf-8", "replace").translate(None, _CONTROL_BYTES), parser)
    if tree is not None:
        remove_unseen(tree, content)
    return tree


def _may_have_a_huge_tag(content: bytes) -> bool:
    """Return whether any stretch longer than a tag should be holds no `>`; reads only a few bytes of each stretch."""
    at = 0
    while len(content) - at > _LONGEST_TAG:
        at = content.rfind(b">", at, at + _LONGEST_TAG + 1) + 1
        if not at:
            return True
    return False


def _without_attributes(tag: re.Match[bytes]) -> bytes:
    """Drop thousands of attributes, which the parser compares pairwise; one long value is harmless."""
    many = tag[0].count(b" ") + tag[0].count(b"\n") + tag[0].count(b"=") > _MOST_ATTRIBUTES
    return tag[1] + b" " if many else tag[0]


def _ends_deep(tree: Any) -> bool:
    """Return whether the last element is nested so deep that the parser may have stopped there.

    The parser's log is certain, but opening it costs half as much as parsing.
    """
    for _ in range(_DEEPEST):
        if not len(tree):
            return False
        tree = tree[-1]
    return True


def _gave_up(parser: Any) -> bool:
    last = parser.error_log.last_error
    return last is not None and bool(last.type_name == "ERR_RESOURCE_LIMIT")


def remove_unseen(tree: Any, content: bytes) -> None:
    """Remove the elements that a reader does not see; `content` is what the tree was parsed from."""
    # Searching the bytes for a word is cheap, visiting every element is not.
    if b"style=" in content or b"STYLE=" in content:
        for element in _styled(tree):
            if _is_hidden_by_style(element):
                remove_element(element)
    if b"hidden" in content or b"HIDDEN" in content:
        for element in _hidden(tree):
            if _is_hidden(element):
                remove_element(element)
    if b"mjx-" in content:
        for element in _drawn(tree):
            if element.find(".//math") is None:
                remove_element(element)
    if hints := unseen_hints(content):
        for element in _of_classes(hints)(tree):
            if not _UNSEEN_CLASSES.isdisjoint((element.get("class") or "").split()):
                remove_element(element)


def unseen_hints(content: bytes) -> tuple[bytes, ...]:
    """Return the substrings of `_UNSEEN_HINTS` that occur among the class names of a page."""
    if b"class" not in content and b"CLASS" not in content:
        return ()
    classes = b" ".join(_CLASSES.findall(content))
    if not classes and b"CLASS" in content:
        classes = content
    return tuple(hint for hint in _UNSEEN_HINTS if hint in classes)


@functools.lru_cache(256)
def _of_classes(hints: tuple[bytes, ...]) -> Any:
    return etree.XPath("//@class[" + " or ".join(f"contains(.,'{hint.decode()}')" for hint in hints) + "]/..")


def _is_hidden_by_style(element: Any) -> bool:
    style = (element.get("style") or "").replace(" ", "").lower()
    if "display:none" in style or "visibility:hidden" in style:
        # Wikipedia hides the MathML of a formula behind an image.
        return "mwe-math" not in (element.get("class") or "")
    return False


def _is_hidden(element: Any) -> bool:
    if element.get("aria-hidden") == "true":
        # Hidden from screen readers means decoration, except formulas that have another form for them.
        return element.tag != "math" and element.find(".//math") is None
    return element.get("hidden") not in (None, "until-found", "false")


def _flattened(html: str) -> str:
    def kept(tag: re.Match[str]) -> str:
        name = tag[1].lower()
        return tag[0] if name in ("script", "style", "br") else "<p>" if name in _OWN_PARAGRAPH else ""

    return _TAG.sub(kept, html)


def remove_element(element: Any) -> None:
    """Empty an element, including its children, but keep the text that follows it."""
    element.clear(keep_tail=True)
    element.tag = "span"


def _remove_empty_heading(removed: Any) -> None:
    """Remove the heading before a removed element where no other content of its section follows."""
    before, after = _neighbour(removed, "getprevious"), _neighbour(removed, "getnext")
    level = _heading_level(before)
    ends = after is None or 0 < _heading_level(after) <= level
    if level and ends and not (before.tail or "").strip() and not (removed.tail or "").strip():
        remove_element(before)


def _neighbour(element: Any, step: str) -> Any:
    """Return the nearest sibling in a direction that was not removed, or that text follows; `None` without one."""
    while (element := getattr(element, step)()) is not None and element.tag == "span" and not len(element):
        if (element.text or "").strip() or (element.tail or "").strip():
            break
    return element


def _heading_level(element: Any) -> int:
    """Return the level of a heading, or of an element around nothing but one; else 0."""
    if element is None:
        return 0
    wrapped = len(element) and element.tag == "div" and "heading" in (element.get("class") or "")
    inner = element[0] if wrapped else element
    return HEADINGS.get(inner.tag, 0)


@functools.cache
def _parser() -> Any:
    return etree.HTMLParser(
        encoding="utf-8", remove_comments=True, remove_pis=True, huge_tree=True, no_network=True, collect_ids=False
    )


def page_to_text(html: str) -> str:
    """Return the main content of a web page: no navigation, advertisements or footers.

    docs/corpus.md compares the selection (`main_content.py`) with other extractors.
    """
    tree = parse_html(html)
    if tree is None:
        return ""
    body = tree.find("body")
    # MediaWiki marks its content, also of pages without prose, where the footer would have the best sum.
    marked = _mediawiki_content(tree) if "mw-content-text" in html else []
    if marked:
        content, unwanted = main_content(marked[0], is_content=True)
    else:
        content, unwanted = main_content(tree if body is None else body)
    for element in unwanted:
        remove_element(element)
    for element in unwanted:
        _remove_empty_heading(element)
    # A page without prose (a list, a form, a picture) has no content to select: return all of its text.
    return render(content) or fragment_to_text(html)
