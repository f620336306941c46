"""Offloaded weights on disk: one memory-mapped file for each weight, and an index."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from piledriver.core import storage
from piledriver.engine.offload.disk.errors import DiskError, disk_error
from piledriver.serve.placement.errors import PlacementError
from piledriver.serve.placement.tensors import set_module_tensor_to_device

# numpy does not have these types: their bits are stored as integers of the same width.
_SAME_BITS = {
    "bfloat16": torch.int16,
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), torch.int8
    ),
}


def offload_weight(
    weight: torch.Tensor, weight_name: str, offload_folder: Any, index: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Write one weight to a file and add it to the index, which is returned."""
    kind = str(weight.dtype).removeprefix("torch.")
    as_integers = _SAME_BITS.get(kind)
    array = (weight.view(as_integers) if as_integers is not None else weight).detach().cpu().numpy()
    path = os.path.join(offload_folder, f"{weight_name}.dat")
    try:
        # Not through a mapping: on a full disk that ends the process.
        with open(path, "wb") as file:
            # An empty file could not be mapped.
            file.write(np.ascontiguousarray(array).data.cast("B") if array.size else b"\0")
    except OSError as error:
        with suppress(OSError):
            os.unlink(path)
        raise disk_error(error, f"writing the {array.nbytes:,} bytes of {weight_name}", str(offload_folder)) from error
    index = {} if index is None else index
    index[weight_name] = {"dtype": kind, "shape": list(array.shape)}
    return index


def load_offloaded_weight(weight_file: Any, weight_info: Mapping[str, Any]) -> torch.Tensor:
    """Return one weight from its file."""
    shape = tuple(weight_info["shape"])
    kind = weight_info["dtype"]
    as_integers = _SAME_BITS.get(kind)
    stored = str(as_integers).removeprefix("torch.") if as_integers is not None else kind
    array = np.memmap(weight_file, dtype=stored, shape=shape or (1,), mode="r")
    tensor = torch.from_numpy(np.array(array if shape else array[0]))
    return tensor.view(getattr(torch, kind)) if as_integers is not None else tensor


def save_offload_index(index: dict[str, Any] | None, offload_folder: Any) -> None:
    """Write the index, merged with the one on disk."""
    if not index:
        return
    path = os.path.join(offload_folder, "index.json")
    before = json.loads(storage.read_text(path)) if os.path.isfile(path) else {}
    storage.write_text(path, json.dumps({**before, **index}, indent=2))


def offload_state_dict(save_dir: Any, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Write every weight of a state dict, and the index."""
    index: dict[str, Any] = {}
    with removed_on_error(index, save_dir):
        for name, weight in state_dict.items():
            offload_weight(weight, name, save_dir, index)
        save_offload_index(index, save_dir)


@contextmanager
def removed_on_error(index: Mapping[str, Any], offload_folder: Any) -> Iterator[None]:
    """Make the folder; remove the files of an index again if what is done within fails."""
    try:
        os.makedirs(offload_folder, exist_ok=True)
    except OSError as error:
        raise DiskError(
            f"{offload_folder}: cannot make the folder of offloaded weights: {error.strerror}",
            fix="name a folder that can be written",
        ) from error
    try:
        yield
    except BaseException:
        for name, info in index.items():
            if "safetensors_file" not in info:
                with suppress(OSError):
                    os.unlink(os.path.join(offload_folder, f"{name}.dat"))
        raise


def load_offloaded_weights(model: Any, index: dict[str, Any] | None, offload_folder: Any) -> None:
    """Read the weights of an index into a model, on the CPU."""
    for name, info in (index or {}).items():
        weight = load_offloaded_weight(os.path.join(offload_folder, f"{name}.dat"), info)
        set_module_tensor_to_device(model, name, "cpu", value=weight)


def extract_submodules_state_dict(state_dict: Mapping[str, Any], submodule_names: list[str]) -> dict[str, Any]:
    """Return the entries of a state dict that belong to the submodules named."""
    return {
        key: value
        for key, value in state_dict.items()
        if any(key == name or key.startswith(name + ".") for name in submodule_names)
    }


class PrefixedDataset(Mapping[str, Any]):
    """A view of a mapping whose keys lack a common prefix."""

    def __init__(self, dataset: Mapping[str, Any], prefix: str) -> None:
        self.dataset = dataset
        self.prefix = prefix

    def __getitem__(self, key: str) -> Any:
        return self.dataset[f"{self.prefix}{key}"]

    def __iter__(self) -> Iterator[str]:
        return (key for key in self.dataset if key.startswith(self.prefix))

    def __len__(self) -> int:
        return len(self.dataset)


class OffloadedWeightsLoader(Mapping[str, Any]):
    """Weights by name, from memory or from disk."""

    def __init__(
        self,
        state_dict: dict[str, torch.Tensor] | None = None,
        save_folder: Any = None,
        index: Mapping[str, Any] | None = None,
        device: Any = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise PlacementError(
                "OffloadedWeightsLoader has no weights", fix="pass a `state_dict`, a `save_folder` or an `index`"
            )
        self.state_dict = state_dict or {}
        self.save_folder = save_folder
        if index is None and save_folder is not None and os.path.isfile(os.path.join(save_folder, "index.json")):
            index = json.loads(storage.read_text(os.path.join(save_folder, "index.json")))
        self.index: dict[str, Any] = dict(index or {})
        self.all_keys = [*self.state_dict, *(key for key in self.index if key not in self.state_dict)]
        self.device = device

    def __getitem__(self, key: str) -> torch.Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        info = self.index[key]
        if info.get("safetensors_file") is not None:
            from safetensors import safe_open

            with safe_open(info["safetensors_file"], framework="pt", device=str(self.device or "cpu")) as file:
                tensor: torch.Tensor = file.get_tensor(info.get("weight_name", key))
            wanted = info.get("dtype")
            return tensor.to(getattr(torch, wanted)) if isinstance(wanted, str) else tensor
        return load_offloaded_weight(os.path.join(self.save_folder, f"{key}.dat"), info)

    def __contains__(self, key: object) -> bool:
        return key in self.state_dict or key in self.index

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)
