"""Byte-fallback tokens (`<0x41>`): how a run of them decodes is known only once the run has ended."""

from __future__ import annotations

import functools
import json
import re

from piledriver.data.tokenizer.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def byte_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of byte-fallback tokens; none if the tokenizer has no such tokens."""
    return _byte_tokens(tokenizer.suffix, tokenizer.content)


@functools.lru_cache(maxsize=8)
def _byte_tokens(suffix: str, content: bytes) -> frozenset[int]:
    if suffix == ".model":
        from sentencepiece import SentencePieceProcessor

        pieces = SentencePieceProcessor(model_proto=content)
        return frozenset(number for number in range(pieces.get_piece_size()) if pieces.is_byte(number))
    if suffix != ".json":
        return frozenset()
    vocabulary = json.loads(content)["model"].get("vocab", {})
    names = enumerate(name for name, _ in vocabulary) if isinstance(vocabulary, list) else ()
    numbered = {name: number for number, name in names} if isinstance(vocabulary, list) else vocabulary
    return frozenset(number for name, number in numbered.items() if _BYTE.fullmatch(name))
