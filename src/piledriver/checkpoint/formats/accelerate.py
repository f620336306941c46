"""Folders of Hugging Face Accelerate's `save_state`, opened for reading. No code in them is run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from piledriver.checkpoint import state_tree
from piledriver.checkpoint.errors import UntrustedFileError
from piledriver.checkpoint.folder_kinds import weight_files
from piledriver.checkpoint.formats.published_weights import open_weights
from piledriver.checkpoint.formats.torch_files import load_attributes, load_torch_file
from piledriver.checkpoint.opened_checkpoint import OpenedCheckpoint
from piledriver.checkpoint.tensor_index import IndexedTensor, TensorIndex, index_tensors


def open_accelerate(folder: Path, rank: int) -> OpenedCheckpoint:
    """Open a folder of Accelerate's for one rank."""
    tensor_index: dict[str, IndexedTensor] = {}
    notes: list[str] = []
    shared: dict[str, list[state_tree.Json]] = {
        "models": [_weights(folder, i, tensor_index) for i in _model_numbers(folder)]
    }
    for kind, stem, ending in (
        ("optimizers", "optimizer", ".bin"),
        ("schedulers", "scheduler", ".bin"),
        ("custom", "custom_checkpoint", ".pkl"),
        ("scaler", "scaler", ".pt"),
    ):
        shared[kind] = []
        for index, path in enumerate(_numbered(folder, stem, ending)):
            structure, tensors = state_tree.split_state(load_torch_file(path), f"{kind}/{index}")
            shared[kind].append(structure)
            tensor_index |= index_tensors(tensors)
    own = {
        f"loaders/{index}": state_tree.encode_inline(load_torch_file(path), path.name)
        for index, path in enumerate(_numbered(folder, "dl_state_dict", ".bin"))
    }
    step: int | None = None
    states = folder / f"random_states_{rank}.pkl"
    if states.is_file():
        found = load_torch_file(states)
        step = found.get("step")
        own["rng"] = state_tree.encode_inline(_random(found), states.name)
    samplers = _samplers(folder, notes)
    return OpenedCheckpoint(
        shared=shared,
        own=own,
        index=tensor_index,
        step=step,
        extra={"samplers": samplers} if samplers else {},
        notes=tuple(notes),
    )


def _weights(folder: Path, index: int, tensor_index: dict[str, IndexedTensor]) -> state_tree.Json:
    found: TensorIndex
    found, aliases = open_weights(folder, index)
    tensor_index |= {f"models/{index}/{name}": entry for name, entry in found.items()}
    names = {name: name for name in found} | aliases
    return {name: {"$": "tensor", "key": f"models/{index}/{target}"} for name, target in names.items()}


def _model_numbers(folder: Path) -> Iterator[int]:
    index = 0
    while weight_files(folder, index) is not None:
        yield index
        index += 1


def _numbered(folder: Path, stem: str, ending: str) -> Iterator[Path]:
    """Yield `optimizer.bin`, `optimizer_1.bin`, ...; custom checkpoints are numbered from `_0`."""
    index = 0
    while True:
        names = [f"{stem}_{index}{ending}"] + ([f"{stem}{ending}"] if index == 0 else [])
        path = next((folder / name for name in names if (folder / name).is_file()), None)
        if path is None:
            return
        yield path
        index += 1


def _random(states: dict[str, Any]) -> dict[str, Any]:
    named = {
        "python": states["random_state"],
        "numpy": states["numpy_random_seed"],
        "torch": states["torch_manual_seed"],
    }
    devices = {
        name: states[f"torch_{name}_manual_seed"] for name in ("cuda", "xpu") if f"torch_{name}_manual_seed" in states
    }
    return named | devices


def _samplers(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in _numbered(folder, "sampler", ".bin"):
        try:
            found.append(load_attributes(path))
        except UntrustedFileError as error:
            notes.append(f"{path.name} was skipped: {error}")
    return found
