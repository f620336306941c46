"""Convert wikitext to text: the order of the steps."""

from __future__ import annotations

import html

from piledriver.corpus.formats.wikitext.blocks import blocks_to_text
from piledriver.corpus.formats.wikitext.expand import expand
from piledriver.corpus.formats.wikitext.inline import inline_to_text
from piledriver.corpus.formats.wikitext.links import link_to_text
from piledriver.corpus.formats.wikitext.protect import Protected, without_controls
from piledriver.corpus.formats.wikitext.site import Site
from piledriver.corpus.formats.wikitext.templates import template_to_text

ENGLISH = Site()


def wikitext_to_text(wikitext: str, site: Site = ENGLISH, title: str = "") -> str:
    """Return the text that a reader of the page sees, without navigation, references, pictures and boxes.

    Headings stand alone, list items start with `- ` or their number, table rows have ` | ` between cells, formulas keep
    their LaTeX between dollar signs. Headings of empty sections are dropped.

    >>> wikitext_to_text("'''Bo''' ({{IPAc-en|b|oʊ}}) is a [[name|nick]].\\n== See ==\\n* [[A]]\\n== Notes ==")
    'Bo (/boʊ/) is a nick.\\n\\nSee\\n\\n- A'
    """
    protected = Protected()
    text = protected.protect(without_controls(wikitext))
    text = expand(text, lambda parts: template_to_text(parts, title), lambda parts: link_to_text(parts, site))
    text = blocks_to_text(inline_to_text(text))
    if "&" in text:
        text = html.unescape(text)
    return protected.restore(text)
