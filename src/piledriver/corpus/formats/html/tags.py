"""The effect of each tag of HTML on the text around it."""

from __future__ import annotations

from piledriver.corpus.text.data_table import word_set

INLINE, SIMPLE, BLOCK, SPECIAL, SKIP = range(5)
"""Part of a line; a block that is only separated; a block with rules of its own; inline with rules; not text."""

_SKIPPED = word_set(
    "head style template iframe object embed applet canvas audio video svg select datalist button textarea noscript"
    " noframes frameset map progress meter input rp"
)
PARAGRAPHS = word_set("p blockquote figure ul ol dl menu dir table fieldset hgroup")
_LINES = word_set(
    "html body div section article main header footer nav aside address center form details summary figcaption"
    " caption tbody thead tfoot tr td th li dt dd legend search dialog option optgroup title marquee"
)
HEADINGS = {f"h{level}": level for level in range(1, 7)}
VERBATIM = frozenset({"pre", "listing", "xmp", "plaintext"})
_OWN_RULES = word_set("ul ol menu dir blockquote table li dd td th tr caption") | HEADINGS.keys()

GAPS = {tag: 2 if tag in PARAGRAPHS else 1 for tag in (PARAGRAPHS | _LINES) - _OWN_RULES}
"""The line breaks around blocks without rules of their own."""

KINDS = (
    dict.fromkeys(_SKIPPED, SKIP)
    | dict.fromkeys(GAPS, SIMPLE)
    | dict.fromkeys(_OWN_RULES, BLOCK)
    | dict.fromkeys(VERBATIM | word_set("script math br hr img code sub sup q rt"), SPECIAL)
)
"""Tags that are not named here are inline."""
