"""Folders that Hugging Face Accelerate's `save_state` wrote, opened as a snapshot. Nothing in them is run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from piledriver.checkpoint import tree
from piledriver.checkpoint.errors import UntrustedFileError
from piledriver.checkpoint.published_weights import open_weights, weight_files
from piledriver.checkpoint.snapshot import Snapshot
from piledriver.checkpoint.tensor_index import Catalog, Entry, in_memory
from piledriver.checkpoint.torch_files import attributes_of, load_weights


def is_accelerate_folder(folder: Path) -> bool:
    """Whether a folder is one of theirs: weights under their names, with an optimizer or random states beside."""
    folder = Path(folder)
    return (
        folder.is_dir()
        and not (folder / "header.json").exists()
        and weight_files(folder) is not None
        and ((folder / "optimizer.bin").is_file() or any(folder.glob("random_states_*.pkl")))
    )


def open_accelerate(folder: Path, rank: int) -> Snapshot:
    """Their folder in our terms."""
    catalog: dict[str, Entry] = {}
    notes: list[str] = []
    shared: dict[str, list[tree.Json]] = {"models": [_weights(folder, i, catalog) for i in _model_numbers(folder)]}
    for kind, stem, ending in (
        ("optimizers", "optimizer", ".bin"),
        ("schedulers", "scheduler", ".bin"),
        ("custom", "custom_checkpoint", ".pkl"),
        ("scaler", "scaler", ".pt"),
    ):
        shared[kind] = []
        for index, path in enumerate(_numbered(folder, stem, ending)):
            structure, tensors = tree.split(load_weights(path), f"{kind}/{index}")
            shared[kind].append(structure)
            catalog |= in_memory(tensors)
    own = {
        f"loaders/{index}": _inline(load_weights(path), path.name)
        for index, path in enumerate(_numbered(folder, "dl_state_dict", ".bin"))
    }
    step: int | None = None
    states = folder / f"random_states_{rank}.pkl"
    if states.is_file():
        found = load_weights(states)
        step = found.get("step")
        own["rng"] = _inline(_random(found), states.name)
    samplers = _samplers(folder, notes)
    return Snapshot(
        shared=shared,
        own=own,
        catalog=catalog,
        step=step,
        extra={"samplers": samplers} if samplers else {},
        notes=tuple(notes),
    )


def _weights(folder: Path, index: int, catalog: dict[str, Entry]) -> tree.Json:
    found: Catalog
    found, aliases = open_weights(folder, index)
    catalog |= {f"models/{index}/{name}": entry for name, entry in found.items()}
    names = {name: name for name in found} | aliases
    return {name: {"$": "tensor", "key": f"models/{index}/{target}"} for name, target in names.items()}


def _model_numbers(folder: Path) -> Iterator[int]:
    index = 0
    while weight_files(folder, index) is not None:
        yield index
        index += 1


def _numbered(folder: Path, stem: str, ending: str) -> Iterator[Path]:
    """`optimizer.bin`, `optimizer_1.bin`, ...; custom checkpoints count from `_0`."""
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


def _inline(state: Any, name: str) -> tree.Json:
    def put(_: str, tensor: torch.Tensor) -> tree.Json:
        return tree.inline(tensor)

    return tree.encode(state, name, put)


def _samplers(folder: Path, notes: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in _numbered(folder, "sampler", ".bin"):
        try:
            found.append(attributes_of(path))
        except UntrustedFileError as error:
            notes.append(f"{path.name} was left out: {error}")
    return found
