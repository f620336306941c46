"""Recognise what wrote a folder, by its file names: Hugging Face weights, Accelerate's `save_state`, torch's DCP."""

from __future__ import annotations

import json
from pathlib import Path

from piledriver.checkpoint.errors import IncompleteCheckpointError
from piledriver.core.storage import read_text

INDEX_ENDING = ".index.json"
DCP_METADATA = ".metadata"


def weight_files(folder: Path, index: int = 0) -> list[Path] | None:
    """Return the files of one model in a folder, safetensors before pickles, or None."""
    for stem, ending in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        single = folder / f"{stem}{f'_{index}' if index else ''}{ending}"
        if single.is_file():
            return [single]
        listing = single.with_name(single.name + INDEX_ENDING)
        if listing.is_file():
            return _listed(listing)
    return None


def is_accelerate_folder(folder: Path) -> bool:
    """Return whether Accelerate's `save_state` wrote a folder: weights beside an optimizer or random states."""
    folder = Path(folder)
    return (
        folder.is_dir()
        and not (folder / "header.json").exists()
        and weight_files(folder) is not None
        and ((folder / "optimizer.bin").is_file() or any(folder.glob("random_states_*.pkl")))
    )


def is_dcp_folder(folder: Path) -> bool:
    """Return whether `torch.distributed.checkpoint.save` wrote a folder."""
    return (folder / DCP_METADATA).is_file()


def _listed(listing: Path) -> list[Path]:
    try:
        names = set(json.loads(read_text(listing))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise IncompleteCheckpointError(f"{listing} is damaged", fix="download or save it again") from error
    if any(Path(name).name != name for name in names):
        raise IncompleteCheckpointError(f"{listing} names a file outside its folder", fix="do not use this folder")
    return sorted(listing.parent / name for name in names)
