"""`PromptEncoder`: prompts to token ids. Unlike documents, a rendered chat contains special tokens by name."""

from __future__ import annotations

import re
from collections.abc import Callable

from piledriver.data.tokenizer.tokenizer import Tokenizer


class PromptEncoder:
    """Encodes prompts with the special tokens that they name, and with at most one document boundary in front."""

    def __init__(self, tokenizer: Tokenizer, bos: int | None = None) -> None:
        """Encode with `tokenizer`; `bos` is the token that starts a prompt, for models that were trained with one."""
        self.tokenizer, self.bos = tokenizer, bos
        self._encode = _with_specials(tokenizer)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a prompt. A prompt that begins with the start token is not given a second one."""
        ids = self._encode(text)
        if add_special_tokens and self.bos is not None and ids[:1] != [self.bos]:
            ids.insert(0, self.bos)
        return ids


def _with_specials(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    if tokenizer.suffix == ".json":
        # The library that defines the format also defines what surrounds a special token (stripping, prefix spaces).
        from tokenizers import Tokenizer as Reference

        reference = Reference.from_str(tokenizer.content.decode("utf-8"))
        return lambda text: list(reference.encode(text, add_special_tokens=False).ids)
    if not tokenizer.specials:
        return lambda text: [int(token) for token in tokenizer.encode(text)]
    names = sorted(tokenizer.specials, key=len, reverse=True)
    pattern = re.compile("(" + "|".join(map(re.escape, names)) + ")")

    def encode(text: str) -> list[int]:
        ids: list[int] = []
        for part in pattern.split(text):
            if part in tokenizer.specials:
                ids.append(tokenizer.specials[part])
            elif part:
                ids.extend(int(token) for token in tokenizer.encode(part))
        return ids

    return encode
