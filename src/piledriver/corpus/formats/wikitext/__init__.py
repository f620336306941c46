"""Wikitext to readable text, in linear time and without a tree: see `convert.wikitext_to_text`."""

from piledriver.corpus.formats.wikitext.convert import wikitext_to_text
from piledriver.corpus.formats.wikitext.site import Site

__all__ = ["Site", "wikitext_to_text"]
