"""Weights as others publish them: `model.safetensors`, shards with an index, or `pytorch_model.bin`."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from piledriver.checkpoint.errors import IncompleteCheckpointError
from piledriver.checkpoint.safetensors_file import read_metadata
from piledriver.checkpoint.tensor_index import Catalog, Entry, in_memory, in_safetensors
from piledriver.checkpoint.torch_files import load_weights
from piledriver.core.storage import read_text

INDEX_ENDING = ".index.json"


def weight_files(folder: Path, index: int = 0) -> list[Path] | None:
    """The files of one model in a folder, safetensors before pickles, or None."""
    for stem, ending in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        whole = folder / f"{stem}{f'_{index}' if index else ''}{ending}"
        if whole.is_file():
            return [whole]
        listing = whole.with_name(whole.name + INDEX_ENDING)
        if listing.is_file():
            return _listed(listing)
    return None


def open_weights(path: Path, index: int = 0) -> tuple[Catalog, dict[str, str]]:
    """A catalog of the weights in a folder or a file, and the tied names that are not in it: name -> kept name."""
    files = weight_files(path, index) if path.is_dir() else [path]
    if not files:
        raise IncompleteCheckpointError(
            f"{path} holds no weights", fix="give a folder with model.safetensors, its index, or pytorch_model.bin"
        )
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise IncompleteCheckpointError(f"{missing[0]} is missing", fix="download or save the folder again")
    catalog: dict[str, Entry] = {}
    aliases: dict[str, str] = {}
    pickled: dict[str, torch.Tensor] = {}
    for file in files:
        if file.suffix == ".safetensors":
            catalog |= in_safetensors([file])
            aliases |= read_metadata(file)
        else:
            pickled |= {key: value for key, value in load_weights(file).items() if isinstance(value, torch.Tensor)}
    catalog |= in_memory(pickled)
    return catalog, {name: kept for name, kept in aliases.items() if kept in catalog and name not in catalog}


def _listed(listing: Path) -> list[Path]:
    try:
        names = set(json.loads(read_text(listing))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise IncompleteCheckpointError(f"{listing} is damaged", fix="download or save it again") from error
    if any(Path(name).name != name for name in names):
        raise IncompleteCheckpointError(f"{listing} names a file outside its folder", fix="do not use this folder")
    return sorted(listing.parent / name for name in names)
