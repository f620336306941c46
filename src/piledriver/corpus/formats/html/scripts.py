"""Raised and lowered text in a line of plain text: Unicode's own characters where it has them all, else `^{...}`."""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    """A set of words, written as a line of text."""
    return frozenset(text.split())


_RAISED = str.maketrans("0123456789+-−=()ni", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ⁿⁱ")
_LOWERED = str.maketrans("0123456789+-−=()aeijoruvx", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎ₐₑᵢⱼₒᵣᵤᵥₓ")
_RAISABLE = frozenset("0123456789+-−=()n")
_LOWERABLE = frozenset("0123456789+-−=()")
# Ordinal endings, titles and trade marks are raised for looks only.
ORNAMENTAL = words(
    "st nd rd th d r s t e er ère ère re ème nde os as o a º ª tm sm ® ™ © mr mrs dr jr sr c bis ter le lle me mme"
)
_LONGEST = 40


def superscript(text: str, before: str, linked: bool = False) -> str:
    """Raised text that follows the character `before`; a linked one is a note's mark and stays readable as one.

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
    """Lowered text that follows the character `before`.

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
    """Whether it reads as an index or exponent: short, and no sentence."""
    return len(text) <= 12 and " " not in text
