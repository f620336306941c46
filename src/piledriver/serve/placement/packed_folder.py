"""Pack the weights of a quantised folder for our kernels, once, into a file without a name.

Formats store codes in their own order, layer by layer; our kernels take theirs merged and in another order. Converting
costs more than reading, so it is done when the folder is opened, one layer at a time; from then on each weight lies in
the file as it is computed with, and streams packed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from piledriver.engine.offload.disk.block_file import DiskStore
from piledriver.engine.offload.disk.extents import Extent
from piledriver.models import Transformer
from piledriver.models.codes import QuantisedCodes
from piledriver.models.interchange import read_weights
from piledriver.models.interchange.folder.names import meta_parameters, stays_fp32
from piledriver.models.interchange.folder.quantised import read_quantised_layers, without_lone_matrices
from piledriver.models.quantised import StackedCodes, replace_experts, replace_layer
from piledriver.plan.placement.room import Room, inference_room


@dataclass(frozen=True)
class PackedFolder:
    """The weights of a quantised folder in one file, by the names of a model whose layers are quantised."""

    extents: dict[str, Extent]
    dense: Transformer
    """The model without quantised layers, on the meta device."""
    largest_layer: int
    """Elements of the largest quantised matrix, which some kernels decode as a whole."""

    def room(self, batch: int, length: int) -> Room:
        """Return the room of a forward pass: that of dense layers, and one decoded matrix."""
        room = inference_room(self.dense, batch, length)
        return replace(room, activations=room.activations + 4 * self.largest_layer)


def pack_folder(
    model: Transformer,
    folder: str | os.PathLike[str],
    theirs: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    scratch: str | os.PathLike[str] | None = None,
) -> PackedFolder:
    """Give a model on the meta device the quantised layers of a folder; return where their weights, packed, lie."""
    store = _Store(folder, scratch)
    shapes, config = meta_parameters(model.config), model.config
    found: dict[str, QuantisedCodes] = {}
    for name, layer in read_quantised_layers(folder, config, theirs):
        for leaf, code in layer.to(dtype=dtype).named_buffers():
            store.put(f"{name}/{leaf}", code)
        found[name] = layer.to("meta")
    experts = without_lone_matrices({name for name, layer in found.items() if isinstance(layer, StackedCodes)})
    taken = {name for name, layer in found.items() if not isinstance(layer, StackedCodes) or name in experts}
    for number, (name, value) in enumerate(read_weights(folder, config, theirs, shapes.keys() - taken)):
        if number == 0:
            # As `load_folder`: in the dtype of the embedding.
            model.to(dtype or value.dtype)
        kept = torch.float32 if stays_fp32(name) else next(model.parameters()).dtype
        store.put(name, value.to(kept))
    for name, parameter in model.named_parameters():
        if stays_fp32(name):
            parameter.data = parameter.data.float()
    with torch.device("meta"):
        dense = Transformer(config).to(next(model.parameters()).dtype).requires_grad_(False).eval()
    for name in taken:
        layer = found[name]
        if not isinstance(layer, StackedCodes):
            path = name.removesuffix(".weight")
            replace_layer(model, path, layer)
        else:
            path = f"{name}_codes"
            if name.endswith(".gate_up"):
                parent = name.removesuffix(".gate_up")
                down = found[f"{parent}.down"]
                assert isinstance(down, StackedCodes)
                replace_experts(model, parent, layer, down)
        for leaf, _ in layer.named_buffers():
            store.rename(f"{name}/{leaf}", f"{path}.{leaf}")
    return PackedFolder(store.extents, dense, max((shapes[name].numel() for name in taken), default=0))


class _Store:
    """The file, of at least the bytes of the folder's own, in which packed weights follow one another."""

    def __init__(self, folder: str | os.PathLike[str], scratch: str | os.PathLike[str] | None) -> None:
        where = folder if os.access(folder, os.W_OK) else tempfile.gettempdir()
        self.store = DiskStore(where if scratch is None else scratch, pin=False)
        sizes = [entry.stat().st_size for entry in os.scandir(folder) if entry.name.endswith(".safetensors")]
        self.store.reserve(sum(sizes))
        self.extents: dict[str, Extent] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor."""
        region = self.store.region_of(self.store.put(tensor.contiguous()))
        self.extents[name] = Extent(
            self.store.folder, region.offset, tensor.dtype, tuple(tensor.shape), file=region.file
        )

    def rename(self, name: str, new: str) -> None:
        """Give a tensor another name."""
        self.extents[new] = self.extents.pop(name)
