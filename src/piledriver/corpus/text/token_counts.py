"""Count the tokens of a text, for budgets in tokens."""

from __future__ import annotations

import os
from typing import Any

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError, UsageError
from piledriver.core.lazy import import_optional

FILE = "tokenizer.json"
_OTHER_KINDS = (".model", ".tiktoken", "vocab.json", "merges.txt", "vocab.txt")


def tokenizer_file(path: str) -> str:
    """Return the path of the `tokenizer.json` that a path names, itself or the one in a folder.

    Raise `UsageError` for a tokenizer of another kind, with the command that converts it.
    """
    if os.path.isdir(path):
        found = sorted(name for name in os.listdir(path) if name.endswith((FILE, *_OTHER_KINDS)))
        if FILE in found:
            return os.path.join(path, FILE)
        folder, what = path, f"{path} holds {', '.join([*found, ''])}no {FILE}"
    elif os.path.exists(path) and path.endswith(_OTHER_KINDS):
        folder, found, what = os.path.dirname(path) or ".", [path], f"{path} is not a {FILE}"
    else:
        return path
    program = f"from transformers import AutoTokenizer as T; T.from_pretrained({folder!r}).save_pretrained({folder!r})"
    raise UsageError(
        f"{what}, by which a budget in tokens is counted",
        fix=f'make one with: python -c "{program}"' if found else f"give a {FILE}, or a folder with one",
    )


class TokenCounter:
    """Count tokens by a `tokenizer.json`, without the tokens that mark the begin and end of a document."""

    def __init__(self, path: str) -> None:
        library = import_optional("tokenizers", extra="data", purpose="a budget in tokens")
        content = storage.read_text(path)
        try:
            self._encoder: Any = library.Tokenizer.from_str(content)
        except Exception as error:  # its parser raises nothing more special
            raise CorruptFileError(f"{path} is not a tokenizer: {error}", fix=f"give a {FILE}") from error
        self._encoder.no_truncation()
        self._encoder.no_padding()

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._encoder.encode(text, add_special_tokens=False).ids)
