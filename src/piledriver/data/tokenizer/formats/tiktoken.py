"""Files of tiktoken ranks (`*.tiktoken`)."""

from __future__ import annotations

import base64
import os
from functools import partial

from piledriver.core.errors import CorruptFileError, UsageError
from piledriver.core.lazy import import_optional
from piledriver.data.tokenizer import encoders
from piledriver.data.tokenizer.encoders import Ids, Offsets
from piledriver.data.tokenizer.tokenizer import Tokenizer

_LETTERS = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
_CL100K = (
    rf"'(?i:[sdmt]|ll|ve|re)|{_LETTERS}+\p{{L}}++|\p{{N}}{{1,3}}+| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"{_LETTERS}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LETTERS}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TIKTOKEN_SCHEMES: dict[str, tuple[str, str, dict[str, int]]] = {
    "gpt2": ("gpt2", _GPT2, {"<|endoftext|>": 50256}),
    "r50k_base": ("gpt2", _GPT2, {"<|endoftext|>": 50256}),
    "cl100k_base": ("gpt4", _CL100K, {"<|endoftext|>": 100257}),
    "o200k_base": ("o200k", _O200K, {"<|endoftext|>": 199999}),
}
"""(gigatoken's name, split pattern, special tokens) by file name: a file of ranks does not hold these."""


def from_tiktoken(
    name: str, content: bytes, encoder: str | None, pattern: str | None, specials: dict[str, int] | None
) -> Tokenizer:
    """Return the tokenizer of a file of tiktoken ranks."""
    ranks = _read_ranks(name, content)
    known = TIKTOKEN_SCHEMES.get(os.path.basename(name).removesuffix(".tiktoken"))
    if pattern is None and known is None:
        raise UsageError(
            f"{name} holds ranks only, and its name is not that of an encoding whose split pattern is known",
            fix=f"name it after its encoding ({', '.join(TIKTOKEN_SCHEMES)}); in Python, give it a pattern",
        )
    scheme, known_pattern, known_specials = known or ("", "", {})
    chosen_specials = known_specials if specials is None else specials
    tiktoken = import_optional("tiktoken", extra="data", purpose="reading tiktoken ranks")
    encoding = tiktoken.Encoding(
        os.path.basename(name), pat_str=pattern or known_pattern, mergeable_ranks=ranks, special_tokens=chosen_specials
    )

    def reference(texts: list[str]) -> tuple[Ids, Offsets]:
        return encoders.concatenate_ids([encoding.encode_ordinary(text) for text in texts])

    candidates: encoders.Candidates = (
        {} if pattern else {"gigatoken": partial(encoders.gigatoken_tiktoken, name, scheme)}
    )
    chosen, encode_batch = encoders.choose(reference, candidates, encoder)
    size = max([*ranks.values(), *chosen_specials.values()]) + 1
    pieces = [b""] * size
    for piece, number in ranks.items():
        pieces[number] = piece
    for special, number in chosen_specials.items():
        pieces[number] = special.encode("utf-8")
    return Tokenizer(
        content=content,
        suffix=".tiktoken",
        vocab_size=size,
        specials=dict(chosen_specials),
        encoder=chosen,
        encode_batch=encode_batch,
        pieces=tuple(pieces),
        reference_decode=encoding.decode,
    )


def _read_ranks(name: str, content: bytes) -> dict[bytes, int]:
    try:
        rows = (line.split() for line in content.splitlines() if line)
        ranks = {base64.b64decode(piece, validate=True): int(rank) for piece, rank in rows}
        missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
        if missing is not None:
            raise ValueError(f"byte {missing} has no rank")
        return ranks
    except ValueError as error:
        raise CorruptFileError(f"{name} is not a file of tiktoken ranks: {error}", fix="fetch it again") from error
