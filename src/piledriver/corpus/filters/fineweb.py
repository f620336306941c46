"""FineWeb's rules (Penedo et al., "The FineWeb datasets", 2024, section 3.6)."""

from __future__ import annotations

from dataclasses import dataclass

from piledriver.corpus.document import Document
from piledriver.corpus.filters import Drop
from piledriver.corpus.filters.statistics import repeated, statistics
from piledriver.corpus.text.words import scan_tokens

# Without quotation marks: FineWeb's code requires the full stop itself.
_ENDS = frozenset(".?!。！？｡．؟۔।॥።፧။‼⁇⁈⁉։")


@dataclass(frozen=True, kw_only=True)
class FineWeb:
    """Drop documents that are lists rather than running text."""

    min_punctuated_lines: float = 0.12
    """Share of lines that end like a sentence."""
    max_short_lines: float = 0.67
    """Share of lines with at most `short_line_characters` characters."""
    short_line_characters: int = 30
    """Longest line that counts as short."""
    max_duplicate_line_characters: float = 0.01
    """Share of characters in lines that occurred before."""
    max_lines_per_word: float = 0.3
    """Line breaks per word."""

    def __call__(self, document: Document) -> Document | Drop:
        """Judge one document."""
        text = document.text
        lines = [line for line in text.split("\n") if line and not line.isspace()]
        if not lines:
            return Drop("fineweb: empty")
        ended = sum([line[-1] in _ENDS for line in lines]) / len(lines)
        if ended < self.min_punctuated_lines:
            return Drop("fineweb: lines without end punctuation", f"{ended:.2f}")
        short = sum([len(line) <= self.short_line_characters for line in lines]) / len(lines)
        if short > self.max_short_lines:
            return Drop("fineweb: short lines", f"{short:.2f}")
        _, characters = repeated(lines)
        share = characters / max(1, len(text) - text.count("\n"))
        if share > self.max_duplicate_line_characters:
            return Drop("fineweb: duplicate lines", f"{share:.3f}")
        # Words here are the tokens of a linguistic tokenizer. There are at least as many as words between spaces, which
        # are counted already for other rules.
        most = text.count("\n") / self.max_lines_per_word if self.max_lines_per_word else 0
        if most > statistics(text).words and most > len(scan_tokens(text)):
            return Drop("fineweb: more lines than words allow")
        return document
