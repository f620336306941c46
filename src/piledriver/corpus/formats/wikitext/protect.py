"""Remove comments and extension tags before any other markup is converted.

`<nowiki>`, `<math>`, `<pre>` and source code hold characters that only look like markup: each is replaced by a number
and restored at the very end. References, galleries and the like are removed.
"""

from __future__ import annotations

import re

from piledriver.corpus.formats.wikitext.marks import LINE_BREAK, PUT_ASIDE_END, PUT_ASIDE_START, VANISHED

_VANISH = (
    "ref|references|gallery|timeline|score|hiero|imagemap|graph|mapframe|maplink|templatestyles|categorytree|inputbox"
    "|indicator|includeonly|templatedata|languages|ce-hidden|section|style|script|charinsert|dynamicpagelist|rss"
)
_KEEP = "nowiki|math|chem|ce|pre|syntaxhighlight|source|poem"
_OPENING = re.compile(rf"<(?:!--|({_VANISH}|{_KEEP})(?=[\s/>])([^<>]*)>)", re.IGNORECASE)
_CLOSING = {tag: re.compile(rf"</{tag}\s*>", re.IGNORECASE) for tag in f"{_VANISH}|{_KEEP}".split("|")}
_COMMENT_LINE = re.compile(r"(?m)^[ \t]*<!--(?:(?!-->)[^\n])*-->[ \t]*\n")
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
_LANGUAGE = re.compile(r"""lang\s*=\s*["']?([\w+#.-]+)""", re.IGNORECASE)
_PUT_ASIDE = re.compile(f"{PUT_ASIDE_START}([0-9]+){PUT_ASIDE_END}")


def without_controls(text: str) -> str:
    """Return the text with `\\n` line breaks and without control characters, which serve as marks (`marks.py`)."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROLS.sub("", text)


class Protected:
    """The protected pieces, by number."""

    def __init__(self) -> None:
        self._kept: list[str] = []

    def protect(self, text: str) -> str:
        """Return the text without comments and removed tags, with protected ones replaced by numbers."""
        if "<" not in text:
            return text
        # A comment alone on its line goes with the line, which would otherwise split the paragraph.
        text = _COMMENT_LINE.sub("", text)
        out: list[str] = []
        at = 0
        never_closed: set[str] = set()
        while (found := _OPENING.search(text, at)) is not None:
            out.append(text[at : found.start()])
            at = found.end()
            if found.group(1) is None:
                end = text.find("-->", at)
                at = len(text) if end < 0 else end + 3
                continue
            tag, attributes = found.group(1).lower(), found.group(2)
            if attributes.endswith("/"):
                out.append(VANISHED)
                continue
            closing = None if tag in never_closed else _CLOSING[tag].search(text, at)
            if closing is None:
                # Kept, so that a thousand unclosed tags are not a thousand searches to the end.
                never_closed.add(tag)
                continue
            out.append(self._replacement(tag, attributes, text[at : closing.start()]))
            at = closing.end()
        out.append(text[at:])
        return "".join(out)

    def restore(self, text: str) -> str:
        """Return the text with the protected pieces restored."""
        if PUT_ASIDE_START not in text:
            return text
        return _PUT_ASIDE.sub(lambda found: self._kept[int(found.group(1))], text)

    def _replacement(self, tag: str, attributes: str, content: str) -> str:
        if tag in ("math", "chem", "ce"):
            formula = " ".join(content.split())
            if tag != "math":
                formula = rf"\ce{{{formula}}}"
            return self._aside(f"$${formula}$$" if "block" in attributes else f"${formula}$")
        if tag == "nowiki":
            return self._aside(content) if content else ""
        if tag == "poem":
            return "\n" + content.strip("\n").replace("\n", LINE_BREAK) + "\n"
        if tag in ("pre", "syntaxhighlight", "source"):
            if "inline" in attributes or "\n" not in content.strip():
                return self._aside(content.strip())
            language = _LANGUAGE.search(attributes)
            code = content.strip("\n")
            return "\n\n" + self._aside(f"```{language.group(1) if language else ''}\n{code}\n```") + "\n\n"
        return VANISHED

    def _aside(self, content: str) -> str:
        self._kept.append(content)
        return f"{PUT_ASIDE_START}{len(self._kept) - 1}{PUT_ASIDE_END}"
