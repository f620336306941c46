"""How many tokens a text has, for budgets that are said in tokens."""

from __future__ import annotations

import os
from typing import Any

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError, MissingDependencyError

FILE = "tokenizer.json"


def tokenizer_file(path: str) -> str:
    """The file itself, where a folder with one may have been given."""
    return os.path.join(path, FILE) if os.path.isdir(path) else path


class TokenCounter:
    """Counts by a `tokenizer.json`, without the tokens that mark a document's begin or end."""

    def __init__(self, path: str) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingDependencyError("tokenizers", extra="data", purpose="a budget in tokens") from error
        content = storage.read_text(path)
        try:
            self._encoder: Any = Tokenizer.from_str(content)
        except Exception as error:  # its parser raises nothing more special
            raise CorruptFileError(f"{path} is not a tokenizer: {error}", fix=f"give a {FILE}") from error
        self._encoder.no_truncation()
        self._encoder.no_padding()

    def count(self, text: str) -> int:
        """The tokens of one text."""
        return len(self._encoder.encode(text, add_special_tokens=False).ids)
