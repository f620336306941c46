"""Convert MathML to LaTeX, the notation of formulas in the whole corpus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from piledriver.corpus.text.data_table import data_table, word_set

MAX_DEPTH = 60

_TABLES = data_table(__package__, "mathml.yaml")
_SYMBOLS: dict[str, str] = _TABLES["symbols"]
_FUNCTIONS = word_set(_TABLES["functions"])
_ACCENTS: dict[str, str] = _TABLES["accents"]
_VARIANTS: dict[str, str] = _TABLES["variants"]


def to_latex(math: Any) -> str:
    r"""Return the LaTeX of a `math` element whose tags have no namespace, without dollar signs.

    >>> from lxml import etree
    >>> to_latex(etree.fromstring("<math><mfrac><mi>α</mi><msup><mi>x</mi><mn>2</mn></msup></mfrac></math>"))
    '\\frac{\\alpha}{x^{2}}'
    """
    annotation = math.find(".//annotation[@encoding='application/x-tex']")
    if annotation is not None and annotation.text:
        return str(annotation.text).strip()
    return " ".join(_row(math, 0).split())


def _row(element: Any, depth: int) -> str:
    parts: list[str] = []
    for child in element:
        part = _node(child, depth + 1)
        # A space keeps a command apart from the letter that follows it.
        if part and parts and part[0].isalpha() and _ends_in_command(parts[-1]):
            parts.append(" ")
        parts.append(part)
    return "".join(parts)


def _ends_in_command(text: str) -> bool:
    backslash = text.rfind("\\")
    return backslash >= 0 and text[backslash + 1 :].isalpha()


def _node(element: Any, depth: int) -> str:
    tag = element.tag
    if not isinstance(tag, str):
        return ""
    if depth > MAX_DEPTH:
        return _escaped("".join(element.itertext()))
    leaf = _LEAVES.get(tag)
    if leaf is not None:
        return leaf(element)
    layout = _LAYOUTS.get(tag)
    return layout(element, depth) if layout is not None else _row(element, depth)


def _escaped(text: str) -> str:
    out: list[str] = []
    for char in text:
        symbol = _SYMBOLS.get(char, char)
        if symbol and symbol[0].isalpha() and out and _ends_in_command(out[-1]):
            out.append(" ")
        out.append(symbol)
    return "".join(out)


def _identifier(element: Any) -> str:
    text = "".join(element.itertext()).strip()
    variant = _VARIANTS.get(element.get("mathvariant", ""))
    if text in _FUNCTIONS and variant is None:
        return f"\\{text}"
    escaped = _escaped(text)
    if variant is not None:
        return f"\\{variant}{{{escaped}}}"
    return f"\\mathrm{{{escaped}}}" if len(text) > 1 and text.isalpha() and text.isascii() else escaped


def _operator(element: Any) -> str:
    text = "".join(element.itertext()).strip()
    if text in _FUNCTIONS:
        return f"\\{text} "
    if text.isalpha() and text.isascii() and len(text) > 1:
        return f"\\operatorname{{{text}}}"
    escaped = _escaped(text)
    spaced = text in "=<>≤≥≠≈≃≅∼≡∝→←⇒⇔∈∉⊂⊆×±∪∩+−-⩽⩾≪≫" and element.get("form") not in ("prefix", "postfix")
    return f" {escaped} " if spaced and text else escaped


def _text(element: Any) -> str:
    text = "".join(element.itertext())
    if not text.strip():
        return " "
    if text.strip().isalnum() or any(char.isalpha() for char in text):
        return f"\\text{{{text}}}" if text.isascii() else f"\\text{{{text.replace('{', '').replace('}', '')}}}"
    return _escaped(text)


def _argument(element: Any, index: int, depth: int) -> str:
    return _node(element[index], depth + 1).strip() if index < len(element) else ""


def _base(element: Any, depth: int) -> str:
    base = _argument(element, 0, depth)
    simple = len(base) <= 1 or (base[0] == "\\" and base[1:].isalpha()) or _is_wrapped(base)
    return base if simple else f"{{{base}}}"


def _is_wrapped(base: str) -> bool:
    return base.startswith(
        ("\\mathrm{", "\\mathbf{", "\\mathbb{", "\\mathcal{", "\\text{", "\\left")
    ) and base.endswith(("}", ")", "]"))


def _under_over(element: Any, depth: int, under: int | None, over: int | None) -> str:
    base = _base(element, depth)
    if base.strip() in ("\\sum", "\\prod", "\\int", "\\oint", "\\lim", "\\max", "\\min", "\\sup", "\\inf"):
        limits = base.strip()
        limits += f"_{{{_argument(element, under, depth)}}}" if under else ""
        return limits + (f"^{{{_argument(element, over, depth)}}}" if over else "")
    for index, stack in ((under, "underset"), (over, "overset")):
        if index is None or index >= len(element):
            continue
        mark = "".join(element[index].itertext()).strip()
        accent = _ACCENTS.get(mark)
        if accent == "bar" and index == under:
            accent = "underline"
        plain = base[1:-1] if base.startswith("{") and base.endswith("}") else base
        base = f"\\{accent}{{{plain}}}" if accent else f"\\{stack}{{{_argument(element, index, depth)}}}{{{plain}}}"
    return base


def _fenced(element: Any, depth: int) -> str:
    inner = (element.get("separators", ",").strip()[:1]).join(_node(child, depth + 1) for child in element)
    opening, closing = element.get("open", "("), element.get("close", ")")
    return f"\\left{_escaped(opening) or '.'}{inner}\\right{_escaped(closing) or '.'}"


def _table(element: Any, depth: int) -> str:
    rows = [
        " & ".join(_node(cell, depth + 2).strip() for cell in row if cell.tag in ("mtd", "maligngroup"))
        for row in element
        if row.tag in ("mtr", "mlabeledtr")
    ]
    return "\\begin{matrix} " + r" \\ ".join(rows) + " \\end{matrix}"


def _multiscripts(element: Any, depth: int) -> str:
    out, side, before = _base(element, depth), "", ""
    scripts: list[str] = []
    prescripts: list[str] = []
    for child in element[1:]:
        if child.tag == "mprescripts":
            side = "before"
            continue
        (prescripts if side else scripts).append("" if child.tag == "none" else _node(child, depth + 1).strip())
    for marks, is_before in ((prescripts, True), (scripts, False)):
        text = "".join(f"{'_^'[index % 2]}{{{mark}}}" for index, mark in enumerate(marks) if mark)
        before, out = (f"{{}}{text}", out) if is_before and text else (before, out if is_before else out + text)
    return before + out


def _long_division(element: Any, depth: int) -> str:
    """Return `dividend \\div divisor = result`; the rows of the calculation are left out."""
    divisor, result, dividend = (_argument(element, index, depth) for index in range(3))
    return f"{dividend} \\div {divisor} = {result}"


def _root(element: Any, depth: int) -> str:
    return f"\\sqrt[{_argument(element, 1, depth)}]{{{_argument(element, 0, depth)}}}"


def _fraction(element: Any, depth: int) -> str:
    command = "binom" if element.get("linethickness") in ("0", "0pt", "0px") else "frac"
    return f"\\{command}{{{_argument(element, 0, depth)}}}{{{_argument(element, 1, depth)}}}"


def _sub_sup(element: Any, depth: int) -> str:
    return f"{_base(element, depth)}_{{{_argument(element, 1, depth)}}}^{{{_argument(element, 2, depth)}}}"


def _sup(element: Any, depth: int) -> str:
    raised = _argument(element, 1, depth)
    return _base(element, depth) + (raised if raised in ("'", "''") else f"^{{{raised}}}")


_LEAVES: dict[str, Callable[[Any], str]] = {
    "mi": _identifier,
    "mo": _operator,
    "mn": lambda element: _escaped("".join(element.itertext()).strip()),
    "mtext": _text,
    "ms": _text,
    "mspace": lambda element: " ",
    "annotation": lambda element: "",
    "annotation-xml": lambda element: "",
    "mphantom": lambda element: "",
    "maligngroup": lambda element: "",
    "malignmark": lambda element: "",
}
_LAYOUTS: dict[str, Callable[[Any, int], str]] = {
    "mfrac": _fraction,
    "msqrt": lambda element, depth: f"\\sqrt{{{_row(element, depth).strip()}}}",
    "mroot": _root,
    "msup": _sup,
    "msub": lambda element, depth: f"{_base(element, depth)}_{{{_argument(element, 1, depth)}}}",
    "msubsup": _sub_sup,
    "munder": lambda element, depth: _under_over(element, depth, 1, None),
    "mover": lambda element, depth: _under_over(element, depth, None, 1),
    "munderover": lambda element, depth: _under_over(element, depth, 1, 2),
    "mfenced": _fenced,
    "mtable": _table,
    "mmultiscripts": _multiscripts,
    "mlongdiv": _long_division,
}
