"""Extractors of the main content of a web page: ours, and two of other projects to compare with."""

from __future__ import annotations

from typing import Literal, get_args

from piledriver.core.errors import MissingDependencyError, PiledriverError, UnknownNameError
from piledriver.corpus.formats.html.convert import page_to_text

Extractor = Literal["piledriver", "trafilatura", "resiliparse"]


def extract_page(html: str, extractor: Extractor = "piledriver") -> str:
    """Return the main content of a page. The default keeps tables, code and formulas; docs/corpus.md compares them.

    >>> extract_page("<nav><a href=x>Home</a></nav><p>The tide comes twice a day, and twice a day it goes.</p>")
    'The tide comes twice a day, and twice a day it goes.'
    """
    if extractor == "piledriver":
        return page_to_text(html)
    if extractor == "trafilatura":
        return _trafilatura(html)
    if extractor == "resiliparse":
        return _resiliparse(html)
    raise UnknownNameError("extractor", extractor, get_args(Extractor))


def _trafilatura(html: str) -> str:
    try:
        import trafilatura
    except ImportError as error:
        raise PiledriverError(
            f"extractor 'trafilatura' cannot be imported: {error}", fix="pip install trafilatura"
        ) from error
    return trafilatura.extract(html, favor_recall=True) or ""


def _resiliparse(html: str) -> str:
    try:
        from resiliparse.extract.html2text import extract_plain_text
    except ImportError as error:
        raise MissingDependencyError("resiliparse", extra="corpus", purpose="extractor 'resiliparse'") from error
    return str(extract_plain_text(html, main_content=True))
