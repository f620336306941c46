"""Incremental detokenisation: the deltas of a sequence concatenate to the decode of all of its tokens.

A character may be split over tokens. Where every token has fixed bytes, an incremental UTF-8 decoder holds back the
bytes of an unfinished character. Other tokenizers (SentencePiece's, WordPiece) decode a token differently by what
stands before it: all tokens are decoded, and text that later tokens may still change is held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from piledriver.data.tokenizer.tokenizer import Tokenizer
from piledriver.serve.text.byte_tokens import byte_tokens

_REPLACEMENT = "\ufffd"
_LONGEST, _KEPT = 64, 16


class Detokenizer(Protocol):
    """Decodes one sequence."""

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that further tokens add, without what later tokens may still change."""

    def finish(self) -> str:
        """Return what was held back: a character that stays unfinished becomes `\ufffd`."""


def make_detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> Detokenizer:
    """Return a detokenizer for one sequence."""
    skipped = frozenset(tokenizer.specials.values()) if skip_special_tokens else frozenset()
    if tokenizer.pieces is not None:
        return _Bytes(tokenizer.pieces, skipped)
    return _Window(tokenizer, skipped)


class _Bytes:
    def __init__(self, pieces: tuple[bytes, ...], skipped: frozenset[int]) -> None:
        self._pieces, self._skipped = pieces, skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, tokens: Sequence[int]) -> str:
        pieces, skipped = self._pieces, self._skipped
        # A model may have more rows than its tokenizer has tokens: those have no text.
        return self._decoder.decode(
            b"".join([pieces[token] for token in tokens if token not in skipped and token < len(pieces)])
        )

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _Window:
    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer, self._skipped = tokenizer, skipped
        self._bytes = byte_tokens(tokenizer)
        self._tokens: list[int] = []
        # Text of the tokens before those: a long sequence is decoded from near its end.
        self._before, self._emitted = "", ""

    def push(self, tokens: Sequence[int]) -> str:
        self._tokens += [token for token in tokens if token not in self._skipped and token < self._tokenizer.vocab_size]
        if not self._tokens or self._tokens[-1] in self._bytes:
            return ""
        text = self._before + self._tokenizer.decode(self._tokens)
        if len(self._tokens) > _LONGEST:
            self._shorten(text)
        # An unfinished character is U+FFFD; spaces may be stripped at the end.
        return self._emit(text.rstrip(_REPLACEMENT + " "))

    def finish(self) -> str:
        return self._emit(self._before + self._tokenizer.decode(self._tokens) if self._tokens else "")

    def _shorten(self, text: str) -> None:
        """Keep the last tokens only, if they decode alone to what they are at the end of the text."""
        last = self._tokens[-_KEPT:]
        end = self._tokenizer.decode(last)
        if end and text.endswith(end) and not self._bytes.intersection(self._tokens[-_KEPT - 1 : -_KEPT + 1]):
            self._before, self._tokens = text[: len(text) - len(end)], last

    def _emit(self, text: str) -> str:
        if not text.startswith(self._emitted) or len(text) <= len(self._emitted):
            return ""
        delta = text[len(self._emitted) :]
        self._emitted = text
        return delta
