"""Copy what a checkpoint folder holds beside its weights."""

from __future__ import annotations

import os
from pathlib import Path

from piledriver.core import storage

_MODEL_FILES = (".json", ".txt", ".model", ".tiktoken", ".jinja")


def copy_model_files(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> list[Path]:
    """Copy config, generation settings and tokenizer of a checkpoint folder, without its weights; return the copies."""
    copies = []
    for path in sorted(Path(source).iterdir()):
        if path.is_file() and path.suffix in _MODEL_FILES and not path.name.endswith("index.json"):
            copies.append(Path(folder) / path.name)
            storage.write_bytes(copies[-1], path.read_bytes())
    return copies
