"""Text of plain HTML without a tree: posts, comments and chapters made of paragraphs, lists, quotations and code.

Most markup that programs write is well formed and uses few tags. A scanner reads it several times as fast as a tree can
be built and walked. Whatever it is not sure of (other tags, tags that cross, tables, formulas, hidden text, odd
entities) it leaves to the tree, so that the text is the same either way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from html.entities import name2codepoint

from piledriver.corpus.html_lines import BREAK, collapsed, verbatim_lines
from piledriver.corpus.html_scripts import subscript, superscript, words
from piledriver.corpus.html_tags import GAPS, HEADINGS
from piledriver.corpus.html_text import TextWriter

# Quotation marks in pairs: a `>` inside a value does not end a tag. Names in capitals are for the tree.
_ATTRIBUTES = r"(?:\s[^<>\"'A-Z]*(?:\"[^<>\"]*\"[^<>\"'A-Z]*)*)?/?"
_TAG = re.compile(rf"<(/?[a-z][a-z0-9]*)({_ATTRIBUTES})>")
# Tags that mean nothing for the text; images, unless a class may call them a formula.
_MEANINGLESS = re.compile(
    r"</?(?:a|abbr|b|big|cite|del|dfn|em|font|i|ins|kbd|mark|s|samp|small|span|strike|strong|tt|u|var)"
    rf"{_ATTRIBUTES}>|<img(?![^<>]*class){_ATTRIBUTES}>"
)
_MAY_HIDE = re.compile("<[^<>]*(?:hidden|style=)")
_APART = {tag: GAPS[tag] for tag in words("p div section article main header footer aside figure figcaption center")}
_HOLDS_BLOCKS = (_APART.keys() | words("li blockquote")) - {"p"}
# End tags that may be left out before these: half as many tags to read.
_BETWEEN_PARAGRAPHS = re.compile(r"</p>\s*<p>")
_BETWEEN_ITEMS = re.compile(r"</li>\s*<li>")
# A link inside raised text makes it the mark of a note.
_MARKED_SCRIPT = re.compile(r"<su[bp][^<>]*>[^<>]*<[^/]")
_DEEPEST = 100
_CONTROLS = bytes((*range(9), 11, *range(14, 32)))
_OFTEN = {"&lt;": "<", "&gt;": ">", "&quot;": '"', "&nbsp;": "\xa0", "&#39;": "'", "&#x27;": "'", "&#x2F;": "/"}
_ENTITY = re.compile(r"&(?:([a-zA-Z]+\d?)|#(?:1[6-9]\d|[2-9]\d\d|[1-9]\d{3}|[1-4]\d{4}|3[2-9]|[4-9]\d|1[01]\d));")
_BETWEEN = "\x00"


class _NotPlainError(Exception):
    """Only a tree can tell."""


def plain_text(html: str, content: bytes) -> str | None:
    """The text of `html`, of which `content` is the UTF-8; None where only a tree can tell.

    >>> markup = "<p>One <b>or</b> two</p><ul><li>x &lt; y</li></ul>"
    >>> plain_text(markup, markup.encode())
    'One or two\\n\\n- x < y'
    """
    if b"<!" in content or len(content.translate(None, _CONTROLS)) != len(content):
        return None
    if (b"hidden" in content or b"style=" in content) and _MAY_HIDE.search(html):
        return None
    markup = _MEANINGLESS.sub("", html)
    parts = _TAG.split(_BETWEEN_ITEMS.sub("<li>", _BETWEEN_PARAGRAPHS.sub("<p>", markup)))
    joined = _BETWEEN.join(parts[::3])
    if "<" in joined:
        return None
    try:
        texts = (_decoded(joined) if "&" in joined else joined).split(_BETWEEN)
        return _Scanner(html).read(texts, parts[1::3], parts[2::3])
    except _NotPlainError:
        return None


def _decoded(text: str) -> str:
    for entity, character in _OFTEN.items():
        text = text.replace(entity, character)
    entities = text.count("&")
    if entities == text.count("&amp;"):
        return text.replace("&amp;", "&")
    names = _ENTITY.findall(text)
    if len(names) != entities or not name2codepoint.keys() >= set(names) - {""}:
        raise _NotPlainError
    return unescape(text)


class _Scanner:
    """The blocks that are open, and the text so far."""

    def __init__(self, html: str) -> None:
        self.html = html
        self.writer = TextWriter()
        self.opened = [""]
        # For each open list, whether it has no item yet.
        self.fresh: list[bool] = []

    def read(self, texts: list[str], names: list[str], attributes: list[str]) -> str:
        """Every tag and the text behind it; `texts` begins with what stands before the first tag."""
        writer, opened, inline, gap_of = self.writer, self.opened, self.writer.inline, _APART.get
        if texts[0] and not texts[0].isspace():
            # Text at the very beginning is a paragraph of its own.
            opened.append("p")
            inline.append(texts[0])
        tags = iter(zip(names, attributes, texts[1:], strict=True))
        for name, attribute, text in tags:
            if attribute and attribute[-1] == "/" and name not in ("br", "hr"):
                raise _NotPlainError
            if gap := gap_of(name):
                if name != "p" or opened[-1] != "p":
                    self.open_block(name)
                writer.stand_apart(gap)
            elif name[0] == "/":
                top = opened.pop()
                if name[1:] != top:
                    raise _NotPlainError
                if gap := gap_of(top):
                    writer.stand_apart(gap)
                else:
                    self.close(top)
            elif name == "br":
                inline.append(BREAK)
            elif name == "code":
                opened.append(name)
                inline.append("`")
            elif name == "pre":
                text = self.preformatted(tags, attribute, text)
            elif name in ("sub", "sup"):
                text = self.script(tags, name, text)
            else:
                self.open(name, attribute)
            if text and (inline or not text.isspace()):
                inline.append(text)
        if opened not in ([""], ["", "p"]):
            raise _NotPlainError
        return writer.finished()

    def open_block(self, name: str) -> None:
        top = self.opened[-1]
        if (top and top not in _HOLDS_BLOCKS) or len(self.opened) > _DEEPEST:
            raise _NotPlainError
        self.opened.append(name)

    def open(self, name: str, attribute: str) -> None:
        """A block with rules of its own."""
        writer = self.writer
        if name == "li":
            writer.flush()
            if self.opened[-1] == "li":
                writer.close_item()
            elif self.opened[-1] in ("ul", "ol"):
                self.opened.append(name)
            else:
                raise _NotPlainError
            writer.open_item(_value(attribute, "value"), first=self.fresh[-1])
            self.fresh[-1] = False
            return
        self.open_block(name)
        writer.flush()
        if name in ("ul", "ol"):
            self.fresh.append(True)
            writer.open_list(_value(attribute, "start"), _value(attribute, "type"), numbered=name == "ol")
        elif name == "blockquote":
            writer.open_quotation()
        elif name in HEADINGS:
            writer.open_heading(HEADINGS[name])
        elif name == "hr":
            self.opened.pop()
            writer.rule()
        else:
            raise _NotPlainError

    def close(self, name: str) -> None:
        writer = self.writer
        if name == "code":
            writer.close_code()
            return
        writer.flush()
        if name == "li":
            writer.close_item()
        elif name in ("ul", "ol"):
            self.fresh.pop()
            writer.close_list()
        elif name == "blockquote":
            writer.close_quotation()
        else:
            writer.close_heading()

    def script(self, tags: Iterator[tuple[str, str, str]], name: str, text: str) -> str:
        """Lowered or raised text; what stands behind it is given back."""
        end, _, behind = next(tags, ("", "", ""))
        if end != f"/{name}" or _MARKED_SCRIPT.search(self.html):
            raise _NotPlainError
        inline = self.writer.inline
        before = inline[-1][-1:] if inline else ""
        text = collapsed(text)
        inline.append(subscript(text, before) if name == "sub" else superscript(text, before))
        return behind

    def preformatted(self, tags: Iterator[tuple[str, str, str]], attribute: str, text: str) -> str:
        """Verbatim up to the end tag; what stands behind that is given back."""
        if self.opened[-1] == "p":
            self.opened.pop()
        self.open_block("pre")
        self.opened.pop()
        texts, classes, code = [text], [_value(attribute, "class") or ""], False
        for name, attribute, text in tags:
            if name == "/pre":
                if self.html.count("class=") != sum(map(bool, classes)):
                    # Something around it, or inside, may say that it is code, and in which language.
                    raise _NotPlainError
                self.writer.verbatim(verbatim_lines("".join(texts)), " ".join(classes), code=code)
                return text
            if name == "code" and not code and not texts[0]:
                code = True
                classes.append(_value(attribute, "class") or "")
            elif name != "/code":
                raise _NotPlainError
            texts.append(text)
        raise _NotPlainError


def _value(attributes: str, name: str) -> str | None:
    if not attributes:
        return None
    found = re.search(rf"\s{name}=\"([^\"]*)\"", attributes)
    return found[1] if found else None
