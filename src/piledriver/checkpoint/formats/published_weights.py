"""Published weights: `model.safetensors`, shards with an index, or `pytorch_model.bin`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from piledriver.checkpoint.errors import IncompleteCheckpointError
from piledriver.checkpoint.folder_kinds import weight_files
from piledriver.checkpoint.formats.torch_files import load_torch_file
from piledriver.checkpoint.safetensors_file import read_metadata
from piledriver.checkpoint.tensor_index import IndexedTensor, TensorIndex, index_safetensors, index_tensors


def open_weights(path: Path, number: int = 0) -> tuple[TensorIndex, dict[str, str]]:
    """Return the index of the weights in a folder or a file, and the tied names that it lacks: name -> stored name."""
    files = weight_files(path, number) if path.is_dir() else [path]
    if not files:
        raise _no_weights(path)
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise IncompleteCheckpointError(f"{missing[0]} does not exist", fix="download or save the folder again")
    index: dict[str, IndexedTensor] = {}
    aliases: dict[str, str] = {}
    pickled: dict[str, torch.Tensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            index |= index_safetensors([file])
            aliases |= read_metadata(file)
        else:
            held = _state_dict(load_torch_file(file), number)
            pickled |= {key: value for key, value in held.items() if isinstance(value, torch.Tensor)}
    index |= index_tensors(pickled)
    return index, {name: kept for name, kept in aliases.items() if kept in index and name not in index}


def _no_weights(folder: Path) -> IncompleteCheckpointError:
    """Return the error for a folder without weights, or with parts of them that an interrupted save or copy left."""
    shards = sorted(path.name for path in folder.glob("*-of-*") if path.suffix in (".safetensors", ".bin"))
    if shards:
        return IncompleteCheckpointError(
            f"{folder} holds {shards[0]} but no index of shards (*.index.json)", fix="download or save the folder again"
        )
    if any(folder.glob("*.distcp")):
        return IncompleteCheckpointError(
            f"{folder} holds DCP files but no .metadata: its save was interrupted", fix="load an earlier checkpoint"
        )
    return IncompleteCheckpointError(
        f"{folder} holds no weights", fix="give a folder with model.safetensors, its index, or pytorch_model.bin"
    )


def _state_dict(content: Any, number: int) -> dict[str, Any]:
    """Return the state dict in a `torch.save` file: the file itself, or below the keys under which loops save one."""
    if isinstance(content, dict) and isinstance(content.get("models"), list) and number < len(content["models"]):
        content = content["models"][number]
    for name in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    return content if isinstance(content, dict) else {}
