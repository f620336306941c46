"""The files of a checkpoint folder: which safetensors file holds which tensor. Pickle is never read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from piledriver.core.errors import CorruptFileError, StorageError
from piledriver.core.json_file import read_json

WHOLE, INDEX, GENERATION = "model.safetensors", "model.safetensors.index.json", "generation_config.json"
AGAIN = "save or fetch the checkpoint again"
"""How to mend a damaged file of a folder."""


def tensor_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor of a folder, by the names of the tensors."""
    if (folder / INDEX).exists():
        places = read_json(folder / INDEX, again=AGAIN).get("weight_map")
        if not isinstance(places, dict):
            raise CorruptFileError(f"{folder / INDEX} has no weight_map", fix=AGAIN)
        return {key: str(folder / name) for key, name in places.items()}
    path = folder / WHOLE
    if not path.exists():
        raise StorageError(f"{folder} holds no {WHOLE}", fix="save the checkpoint as safetensors; pickle is never read")
    with open_tensors(str(path)) as file:
        return dict.fromkeys(file.keys(), str(path))


def open_tensors(path: str) -> Any:
    """Return an open safetensors file; it closes as a context."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CorruptFileError(f"{path} is missing", fix=AGAIN) from error
    except (SafetensorError, OSError) as error:
        raise CorruptFileError(f"{path} is not a complete safetensors file: {error}", fix=AGAIN) from error
