"""Published weights: `model.safetensors`, shards with an index, or `pytorch_model.bin`."""

from __future__ import annotations

from pathlib import Path

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
        raise IncompleteCheckpointError(
            f"{path} holds no weights", fix="give a folder with model.safetensors, its index, or pytorch_model.bin"
        )
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
            pickled |= {key: value for key, value in load_torch_file(file).items() if isinstance(value, torch.Tensor)}
    index |= index_tensors(pickled)
    return index, {name: kept for name, kept in aliases.items() if kept in index and name not in index}
