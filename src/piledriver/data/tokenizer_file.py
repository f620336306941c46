"""Whether a tokenizer can count the tokens of a corpus's budget: that is done by a `tokenizer.json`."""

from __future__ import annotations

import os

from piledriver.core.errors import UsageError

_JSON = "tokenizer.json"
_OTHERS = (".model", ".tiktoken", "vocab.json", "merges.txt", "vocab.txt")


def check_counts_tokens(path: str) -> None:
    """Refuse a folder, or a file, of a tokenizer of another kind, and say how to come by the right one.

    What is not there at all, or is no tokenizer, is for the build to say.
    """
    if os.path.isdir(path):
        found = sorted(name for name in os.listdir(path) if name.endswith((_JSON, *_OTHERS)))
        if _JSON in found:
            return
        folder, what = path, f"{path} holds {', '.join([*found, ''])}no {_JSON}"
    elif os.path.exists(path) and path.endswith(_OTHERS):
        folder, found, what = os.path.dirname(path) or ".", [path], f"{path} is not a {_JSON}"
    else:
        return
    program = f"from transformers import AutoTokenizer as T; T.from_pretrained({folder!r}).save_pretrained({folder!r})"
    raise UsageError(
        f"{what}, by which a budget in tokens is counted",
        fix=f'make one with: python -c "{program}"' if found else f"give a {_JSON}, or a folder with one",
    )
