"""Convert formulas in HTML to LaTeX: the author's source where the page has it, else converted MathML."""

from __future__ import annotations

from typing import Any

from lxml import etree

from piledriver.corpus.formats import mathml

_written = etree.XPath("(.//annotation[contains(@encoding,'tex') or contains(@encoding,'TeX')])[1]")


def math_to_tex(element: Any) -> str:
    """Return the LaTeX of a `math` element without delimiters.

    >>> math_to_tex(etree.fromstring("<math alttext='{\\\\displaystyle x^2}'><mi>x</mi></math>"))
    'x^2'
    """
    annotations = _written(element)
    written = "".join(annotations[0].itertext()) if annotations else element.get("alttext") or ""
    return clean_tex(written) or mathml.to_latex(element)


def clean_tex(tex: str) -> str:
    """Return LaTeX on one line, without the wrappers that converters add around every formula.

    >>> clean_tex("{\\\\displaystyle E = mc^{2}}")
    'E = mc^{2}'
    """
    tex = " ".join(tex.split())
    for opening, closing in (("$$", "$$"), ("\\(", "\\)"), ("\\[", "\\]"), ("$", "$")):
        if tex.startswith(opening) and tex.endswith(closing) and len(tex) > len(opening) + len(closing):
            tex = tex[len(opening) : -len(closing)].strip()
    for style in ("{\\displaystyle ", "{\\textstyle ", "{\\scriptstyle "):
        if tex.startswith(style) and tex.endswith("}"):
            tex = tex[len(style) : -1].strip()
    return tex.removeprefix("\\displaystyle ").strip()
