"""C4's rules (Raffel et al., "Exploring the limits of transfer learning", 2020, section 2.2)."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from piledriver.corpus.document import Document
from piledriver.corpus.filters import Drop

_ENDS = (".", "?", "!", '"', "'", "”", "’")
_CITATIONS = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_SENTENCE_END = re.compile(r"[.!?]+(?=[\s\"'”’)\]]|$)")
_UNWANTED = re.compile(r"javascript|terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies")
_UNWANTED_HINTS = ("javascript", "terms of use", "privacy policy", "cookie")


@dataclass(frozen=True, kw_only=True)
class C4:
    """Remove lines that are not sentences; drop documents with too few left."""

    min_words_in_line: int = 3
    """Drop lines with fewer words."""
    min_sentences: int = 5
    """Drop documents with fewer sentences left."""
    max_word_length: int = 1000
    """Drop lines with a longer word."""
    end_punctuation: bool = True
    """Remove lines that do not end like a sentence."""
    refuse_curly_brackets: bool = True
    """Drop documents with a curly bracket, most of which are code."""

    def __call__(self, document: Document) -> Document | Drop:
        """Judge one document; return it with its good lines alone."""
        text = document.text
        if self.refuse_curly_brackets and "{" in text:
            return Drop("c4: curly bracket")
        lowered = text.lower()
        if "lorem ipsum" in lowered:
            return Drop("c4: lorem ipsum")
        # Most documents have no such line: a few plain searches of the whole text save one in every line.
        has_unwanted = any(hint in lowered for hint in _UNWANTED_HINTS)
        kept = []
        sentences = 0
        for raw_line in text.split("\n"):
            line = whole = raw_line.strip()
            if "[" in line:
                line = _CITATIONS.sub("", line)
            # The cheapest test first: most lines that are removed are not sentences.
            if self.end_punctuation and (not line.endswith(_ENDS) or line.endswith("...")):
                continue
            if len(whole.split(None, self.min_words_in_line)) < self.min_words_in_line:
                continue
            if len(whole) > self.max_word_length and max(map(len, whole.split()), default=0) > self.max_word_length:
                continue
            if has_unwanted and _UNWANTED.search(line.lower()):
                continue
            # The count matters only until it is high enough.
            if sentences < self.min_sentences:
                sentences += max(1, len(_SENTENCE_END.findall(line)))
            kept.append(line)
        if sentences < self.min_sentences:
            return Drop("c4: too few sentences", str(sentences))
        return msgspec.structs.replace(document, text="\n".join(kept))
