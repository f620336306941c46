"""Gopher's rules (Rae et al., "Scaling language models", 2021, table A1), with datatrove's thresholds.

Words are those between white space, as in the paper; a character of a script without spaces is a word too, except for
the mean word length. datatrove counts the tokens of a linguistic tokenizer, punctuation included: benchmarks/filters.py
reports how often the verdicts agree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from piledriver.corpus.document import Document
from piledriver.corpus.filters import Drop
from piledriver.corpus.filters.statistics import repeated, repetition, statistics
from piledriver.corpus.text.words import UInt64Array, scan_words


@cache
def _stop_words() -> UInt64Array:
    return scan_words("the be to of and that have with")[0]


@dataclass(frozen=True, kw_only=True)
class GopherQuality:
    """Drop documents that do not have the shape of prose."""

    min_words: int = 50
    """Words in the document, at least."""
    max_words: int = 100_000
    """Words in the document, at most."""
    min_mean_word_length: float = 3.0
    """Mean characters per word, at least."""
    max_mean_word_length: float = 10.0
    """Mean characters per word, at most."""
    max_symbol_ratio: float = 0.1
    """Hash signs for each word, and ellipses for each word, at most."""
    max_bullet_lines: float = 0.9
    """Share of lines that begin with a bullet, at most."""
    max_ellipsis_lines: float = 0.3
    """Share of lines that end in an ellipsis, at most."""
    min_alphabetic_words: float = 0.8
    """Share of words with a letter, at least."""
    min_stop_words: int = 2
    """How many of eight very common English words must occur; 0 for other languages."""

    def __call__(self, document: Document) -> Document | Drop:
        """Judge one document."""
        text = document.text
        counted = statistics(text)
        if counted.words < self.min_words:
            return Drop("gopher: too few words", str(counted.words))
        if counted.words > self.max_words:
            return Drop("gopher: too many words", str(counted.words))
        if counted.spaced_words:
            mean_length = counted.spaced_characters / counted.spaced_words
            if not self.min_mean_word_length <= mean_length <= self.max_mean_word_length:
                return Drop("gopher: mean word length", f"{mean_length:.2f}")
        if text.count("#") > self.max_symbol_ratio * counted.words:
            return Drop("gopher: too many hash signs")
        ellipses = text.count("...") + text.count("…")
        if ellipses > self.max_symbol_ratio * counted.words:
            return Drop("gopher: too many ellipses")
        lines = text.count("\n") + 1
        # Few texts have that many bullets anywhere, and counting characters is cheaper than matching lines.
        most = self.max_bullet_lines * lines
        if sum(map(text.count, "•-*")) > most and len(_BULLET_LINES.findall(text)) > most:
            return Drop("gopher: too many bullet lines")
        if ellipses and len(_ELLIPSIS_LINES.findall(text)) > self.max_ellipsis_lines * lines:
            return Drop("gopher: too many lines end in an ellipsis")
        if counted.alphabetic_words < self.min_alphabetic_words * counted.words:
            return Drop("gopher: too few words with letters", f"{counted.alphabetic_words / counted.words:.2f}")
        if self.min_stop_words and counted.count_present(_stop_words()) < self.min_stop_words:
            return Drop("gopher: too few stop words")
        return document


_BULLET_LINES = re.compile(r"^[^\S\n]*[•*-]", re.MULTILINE)
_ELLIPSIS_LINES = re.compile(r"(?:\.\.\.|…)[^\S\n]*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class GopherRepetition:
    """Drop documents that repeat lines, paragraphs or word n-grams."""

    max_duplicate_lines: float = 0.3
    """Share of lines that occurred before."""
    max_duplicate_line_characters: float = 0.2
    """Share of characters in such lines."""
    max_duplicate_paragraphs: float = 0.3
    """Share of paragraphs that occurred before."""
    max_duplicate_paragraph_characters: float = 0.2
    """Share of characters in such paragraphs."""
    max_top_ngram_characters: tuple[float, ...] = (0.2, 0.18, 0.16)
    """Share of characters in the most frequent sequence of 2, 3, 4 words, at most."""
    max_duplicate_ngram_characters: tuple[float, ...] = (0.15, 0.14, 0.13, 0.12, 0.11, 0.10)
    """Share of characters in sequences of 5 to 10 words that occur earlier, at most."""

    def __call__(self, document: Document) -> Document | Drop:
        """Judge one document."""
        text = document.text
        size = max(1, len(text))
        for name, parts, most, most_characters in (
            (
                "lines",
                [line for line in text.split("\n") if line],
                self.max_duplicate_lines,
                self.max_duplicate_line_characters,
            ),
            ("paragraphs", text.split("\n\n"), self.max_duplicate_paragraphs, self.max_duplicate_paragraph_characters),
        ):
            count, characters = repeated(parts)
            if count > most * len(parts):
                return Drop(f"gopher: duplicate {name}", f"{count / len(parts):.2f}")
            if characters > most_characters * size:
                return Drop(f"gopher: characters in duplicate {name}", f"{characters / size:.2f}")
        top, duplicate = repetition(text, len(self.max_top_ngram_characters), len(self.max_duplicate_ngram_characters))
        for width, (share, most) in enumerate(zip(top, self.max_top_ngram_characters, strict=True), 2):
            if share > most:
                return Drop(f"gopher: most frequent {width}-gram", f"{share:.2f}")
        for width, (share, most) in enumerate(zip(duplicate, self.max_duplicate_ngram_characters, strict=True), 5):
            if share > most:
                return Drop(f"gopher: repeated {width}-grams", f"{share:.2f}")
        return document
