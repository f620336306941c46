"""Mathematics in HTML and XML as LaTeX: what the author wrote where it was kept, else a reading of the MathML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lxml import etree

from piledriver.corpus.html_scripts import words

_FUNCTIONS = words(
    "arccos arcsin arctan arg cos cosh cot coth csc deg det dim exp gcd hom inf ker lg lim liminf limsup ln log max"
    " min Pr sec sin sinh sup tan tanh"
)
_ACCENTS = {
    "^": "hat",
    "ˆ": "hat",
    "~": "tilde",
    "˜": "tilde",
    "¯": "bar",
    "‾": "overline",
    "→": "vec",
    "⃗": "vec",
    "˙": "dot",
    "¨": "ddot",
    "⏞": "overbrace",
}
# Invisible operators (function application, times, separator, plus) say nothing in text.
_OPERATORS = {"\u2061": "", "\u2062": "", "\u2063": "", "\u2064": "", "−": "-", "{": "\\{", "}": "\\}"}
_LIMITS = frozenset("∑∏∐⋃⋂⋁⋀∫∬∮") | {
    "\\lim",
    "\\max",
    "\\min",
    "\\sup",
    "\\inf",
    "\\limsup",
    "\\liminf",
    "lim",
    "max",
    "min",
}
_TOKENS = frozenset({"mi", "mn", "mo", "mtext", "ms", "mspace", "annotation", "annotation-xml", "mglyph"})


def math_to_tex(element: Any) -> str:
    """The LaTeX of a `math` element without delimiters.

    >>> math_to_tex(etree.fromstring("<math><mfrac><mn>1</mn><msup><mi>x</mi><mn>2</mn></msup></mfrac></math>"))
    '\\\\frac{1}{x^2}'
    """
    kept = element.xpath(
        "(descendant::*[local-name()='annotation'][contains(@encoding,'tex') or contains(@encoding,'TeX')])[1]"
    )
    written = "".join(kept[0].itertext()) if kept else element.get("alttext") or ""
    return clean_tex(written) or mathml_to_tex(element)


def clean_tex(tex: str) -> str:
    """LaTeX on one line, without the wrappers that converters add around every formula.

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


def mathml_to_tex(element: Any) -> str:
    """Presentation MathML read as LaTeX; symbols stay the characters that they are. No recursion, so depth is free."""
    waiting: list[list[str]] = [[]]
    walk = etree.iterwalk(element, events=("start", "end"))
    for event, node in walk:
        name = _local(node)
        if event == "start":
            waiting.append([])
            if name in _TOKENS:
                walk.skip_subtree()
            continue
        parts = waiting.pop()
        waiting[-1].append(_token(name, node) if name in _TOKENS else _combined(name, node, parts))
    return " ".join("".join(waiting[0]).split())


def _local(node: Any) -> str:
    tag = node.tag
    return tag.rpartition("}")[2].rpartition(":")[2].lower() if isinstance(tag, str) else ""


def _token(name: str, node: Any) -> str:
    if name == "mspace":
        return " "
    if name in ("annotation", "annotation-xml", "mglyph"):
        return ""
    text = " ".join("".join(node.itertext()).split())
    if name == "mo":
        return _OPERATORS.get(text, f"\\{text} " if text in _FUNCTIONS else text)
    if name == "mi" and len(text) > 1 and text.isalpha():
        return f"\\{text} " if text in _FUNCTIONS else f"\\mathrm{{{text}}}" if text.isascii() else text
    if name in ("mtext", "ms"):
        return f"\\text{{{text}}}" if text.strip() else " "
    return text


def _combined(name: str, node: Any, parts: Sequence[str]) -> str:
    if len(parts) == 2:
        base, other = parts
        if name == "mfrac":
            return f"\\frac{{{base}}}{{{other}}}"
        if name == "mroot":
            return f"\\sqrt[{other}]{{{base}}}"
        if name == "msup":
            return f"{_base(base)}^{_braced(other)}"
        if name == "msub":
            return f"{_base(base)}_{_braced(other)}"
        if name == "mover":
            if other.strip() in _ACCENTS:
                return f"\\{_ACCENTS[other.strip()]}{{{base}}}"
            return f"{base}^{_braced(other)}" if base.strip() in _LIMITS else f"\\overset{{{other}}}{{{base}}}"
        if name == "munder":
            return f"{base}_{_braced(other)}" if base.strip() in _LIMITS else f"\\underset{{{other}}}{{{base}}}"
    if len(parts) == 3 and name in ("msubsup", "munderover"):
        return f"{_base(parts[0])}_{_braced(parts[1])}^{_braced(parts[2])}"
    if name == "msqrt":
        return f"\\sqrt{{{''.join(parts)}}}"
    if name == "mfenced":
        separator = (node.get("separators", ",") or "").strip()[:1]
        return f"{node.get('open', '(')}{separator.join(parts)}{node.get('close', ')')}"
    if name == "mtable":
        rows = " \\\\ ".join(parts)
        return f"\\begin{{matrix}} {rows} \\end{{matrix}}"
    if name in ("mtr", "mlabeledtr"):
        return " & ".join(parts)
    if name == "semantics":
        return parts[0] if parts else ""
    return "" if name == "mphantom" else "".join(parts)


def _base(text: str) -> str:
    return text if len(text) <= 1 or text.startswith("\\") or text[-1:] in ")]}|" else f"{{{text}}}"


def _braced(text: str) -> str:
    text = text.strip()
    return text if len(text) == 1 else f"{{{text}}}"
