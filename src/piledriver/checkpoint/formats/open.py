"""Open a folder or file of any format that can be loaded."""

from __future__ import annotations

from pathlib import Path

from piledriver.checkpoint import folders
from piledriver.checkpoint.errors import CheckpointError
from piledriver.checkpoint.folder_kinds import is_accelerate_folder, is_dcp_folder
from piledriver.checkpoint.formats.accelerate import open_accelerate
from piledriver.checkpoint.formats.dcp import open_dcp
from piledriver.checkpoint.formats.published_weights import open_weights
from piledriver.checkpoint.header import DATA, HEADER
from piledriver.checkpoint.opened_checkpoint import OpenedCheckpoint, open_checkpoint
from piledriver.checkpoint.tensor_index import TensorIndex


def open_folder(folder: Path, rank: int) -> OpenedCheckpoint:
    """Open a checkpoint, or a folder that Accelerate wrote, for one rank."""
    if not (folder / HEADER).exists() and is_accelerate_folder(folder):
        return open_accelerate(folder, rank)
    return open_checkpoint(folder, rank)


def open_any(path: Path) -> OpenedCheckpoint:
    """Open a checkpoint, an Accelerate folder, or weights in a folder or file, for rank 0."""
    return open_folder(path, 0) if path.is_dir() and folders.is_loadable(path) else open_model(path)


def open_model(path: Path, number: int = 0) -> OpenedCheckpoint:
    """Open one model of a checkpoint, or the weights in a folder or file of any format."""
    if path.is_dir() and (folders.is_loadable(path) or (path / HEADER).exists() or any(path.glob(f"{DATA}*"))):
        opened = open_folder(path, 0)
        models = opened.shared.get("models", [])
        if number >= len(models):
            raise CheckpointError(f"{path} holds {len(models)} models", fix="number them from 0")
        return OpenedCheckpoint(shared={"models": [models[number]]}, own={}, index=opened.index, header=opened.header)
    index: TensorIndex
    aliases: dict[str, str] = {}
    if path.is_dir() and is_dcp_folder(path):
        found = open_dcp(path)
        # `convert --to dcp` keeps the keys of a checkpoint, which may hold several models and optimizers.
        prefix = f"models/{number}/"
        ours = {key.removeprefix(prefix): tensor for key, tensor in found.items() if key.startswith(prefix)}
        index = ours or found
    else:
        index, aliases = open_weights(path, number)
    named = {name: name for name in index} | aliases
    structure = {name: {"$": "tensor", "key": key} for name, key in named.items()}
    return OpenedCheckpoint(shared={"models": [structure]}, own={}, index=index)
