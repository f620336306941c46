"""Super- and subscripts in plain text: Unicode characters where all exist, else `^{...}` and `_{...}`."""

from __future__ import annotations

from piledriver.corpus.text.data_table import word_set

_RAISED = str.maketrans("0123456789+-−=()ni", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ⁿⁱ")
_LOWERED = str.maketrans("0123456789+-−=()aeijoruvx", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎ₐₑᵢⱼₒᵣᵤᵥₓ")
_RAISABLE = frozenset("0123456789+-−=()n")
_LOWERABLE = frozenset("0123456789+-−=()")
# Ordinal endings, titles and trade marks, where raising is only typography.
ORNAMENTAL = word_set(
    "st nd rd th d r s t e er ère ère re ème nde os as o a º ª tm sm ® ™ © mr mrs dr jr sr c bis ter le lle me mme"
)
_LONGEST = 40


def superscript(text: str, before: str, linked: bool = False) -> str:
    """Return a superscript that follows the character `before`; a linked one is a footnote mark.

    >>> superscript("2", "x"), superscript("th", "4"), superscript("1", "d", linked=True), superscript("i+k", "x")
    ('²', 'th', '[1]', '^{i+k}')
    """
    if linked:
        return f"[{text}]" if text.isdigit() else text
    if not text or not before or before.isspace() or len(text) > _LONGEST:
        return text
    if _RAISABLE.issuperset(text):
        return text.translate(_RAISED)
    if (
        (text.lower() in ORNAMENTAL and (len(text) > 1 or not text.isascii() or before.isdigit()))
        or text[0] in "[*†‡§¶#"
        or not _is_script(text)
    ):
        return text
    return f"^{text}" if len(text) == 1 else f"^{{{text}}}"


def subscript(text: str, before: str) -> str:
    """Return a subscript that follows the character `before`.

    >>> subscript("2", "H"), subscript("max", "x")
    ('₂', '_{max}')
    """
    if not text or not before or before.isspace() or len(text) > _LONGEST:
        return text
    if _LOWERABLE.issuperset(text):
        return text.translate(_LOWERED)
    if not _is_script(text):
        return text
    return f"_{text}" if len(text) == 1 else f"_{{{text}}}"


def _is_script(text: str) -> bool:
    """Return whether a text reads as an index or exponent: short, without spaces."""
    return len(text) <= 12 and " " not in text
