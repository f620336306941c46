"""Count the tokens of a text, for budgets in tokens."""

from __future__ import annotations

import hashlib
import os
from typing import Any

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError, PiledriverError, UsageError
from piledriver.core.lazy import import_optional

FILE = "tokenizer.json"
GPT2_FILES = ("vocab.json", "merges.txt")
END_OF_TEXT = "<|endoftext|>"
_OTHER_KINDS = (".model", ".tiktoken", "vocab.json", "merges.txt", "vocab.txt")


def read_tokenizer(path: str) -> str:
    """Return the content of the `tokenizer.json` at a path or in a folder, or that of GPT-2's pair of files.

    Raise `UsageError` for a tokenizer of another kind, with the command that converts it.
    """
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    if not os.path.isdir(path) and not path.endswith(_OTHER_KINDS):
        return storage.read_text(path)
    found = sorted(name for name in os.listdir(folder) if name.endswith((FILE, *_OTHER_KINDS)))
    if FILE in found and folder == path:
        return storage.read_text(os.path.join(path, FILE))
    if {*GPT2_FILES} <= {*found} and path.endswith((folder, *GPT2_FILES)):
        return gpt2_tokenizer(folder)
    what = f"{path} holds {', '.join([*found, ''])}no {FILE}" if folder == path else f"{path} is not a {FILE}"
    program = f"from transformers import AutoTokenizer as T; T.from_pretrained({folder!r}).save_pretrained({folder!r})"
    raise UsageError(
        f"{what}, by which a budget in tokens is counted",
        fix=f'make one with: python -c "{program}"' if found else f"give a {FILE}, or a folder with one",
    )


def gpt2_tokenizer(folder: str) -> str:
    """Return the `tokenizer.json` of GPT-2's `vocab.json` and `merges.txt` in a folder."""
    library = import_optional("tokenizers", extra="data", purpose="reading vocab.json and merges.txt")
    try:
        model = library.models.BPE.from_file(*(os.path.join(folder, name) for name in GPT2_FILES))
    except Exception as error:  # the library raises plain Exception
        what = f"{folder}: vocab.json or merges.txt is damaged: {error}"
        raise CorruptFileError(what, fix="fetch them again") from error
    made = library.Tokenizer(model)
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    if made.token_to_id(END_OF_TEXT) is not None:
        made.add_special_tokens([END_OF_TEXT])
    return str(made.to_str())


def tokenizer_checksum(path: str) -> str:
    """Return the checksum of a tokenizer's content."""
    return hashlib.sha256(read_tokenizer(path).encode()).hexdigest()


class TokenCounter:
    """Count tokens by a `tokenizer.json`, without the tokens that mark the begin and end of a document.

    `checksum`, if it is given, must be that of the content.
    """

    def __init__(self, path: str, checksum: str | None = None) -> None:
        library = import_optional("tokenizers", extra="data", purpose="a budget in tokens")
        content = read_tokenizer(path)
        if checksum not in (None, hashlib.sha256(content.encode()).hexdigest()):
            raise PiledriverError(f"{path} changed while the corpus was built", fix="run the build again")
        try:
            self._encoder: Any = library.Tokenizer.from_str(content)
        except Exception as error:  # its parser raises nothing more special
            raise CorruptFileError(f"{path} is not a tokenizer: {error}", fix=f"give a {FILE}") from error
        self._encoder.no_truncation()
        self._encoder.no_padding()

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self._encoder.encode(text, add_special_tokens=False).ids)
