"""Drop source files that are data, minified or generated, by the rules of The Stack and The Pile."""

from __future__ import annotations

from dataclasses import dataclass

from piledriver.corpus.document import Document
from piledriver.corpus.filters import Drop


@dataclass(frozen=True, kw_only=True)
class Code:
    """Drop source files with very long lines, few letters or many digits.

    >>> Code()(Document("0123456789 " * 40))
    Drop(reason='code: digits', detail='0.91')
    """

    max_mean_line_length: float = 100.0
    """Mean characters per line."""
    max_line_length: int = 1000
    """Characters in the longest line."""
    min_alphanumeric: float = 0.25
    """Share of letters and digits among all characters."""
    max_digits: float = 0.8
    """Share of digits among all characters but spaces."""

    def __call__(self, document: Document) -> Document | Drop:
        """Judge one document."""
        text = document.text
        lines = text.splitlines()
        visible = len(text) - sum(map(str.isspace, text))
        if not visible:
            return Drop("code: empty")
        digits = sum(map(str.isdigit, text))
        if digits > self.max_digits * visible:
            return Drop("code: digits", f"{digits / len(text):.2f}")
        longest = max(map(len, lines))
        if longest > self.max_line_length:
            return Drop("code: longest line", str(longest))
        mean = sum(map(len, lines)) / len(lines)
        if mean > self.max_mean_line_length:
            return Drop("code: mean line length", f"{mean:.1f}")
        alphanumeric = sum(map(str.isalnum, text)) / len(text)
        if alphanumeric < self.min_alphanumeric:
            return Drop("code: alphanumeric characters", f"{alphanumeric:.2f}")
        return document
