"""Wikitext to readable text, in linear time and without a tree: see `convert.to_text`."""

from piledriver.corpus.formats.wikitext.convert import to_text
from piledriver.corpus.formats.wikitext.site import Site

__all__ = ["Site", "to_text"]
