"""The output layer of a language model: its logits stay uncomputed until code reads them (`lazy_logits`)."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from piledriver.engine.blocks import blocks_of
from piledriver.engine.fused.lazy_logits import lazy_linear, mark_stale
from piledriver.engine.fused.plain import in_autocast, install
from piledriver.engine.torch_private import is_transformed

OPERATION = "output layer and cross-entropy"
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def output_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that map hidden states to a vocabulary, by name.

    These are what `transformers` models name as such; for others, linear layers outside the blocks with a row for each
    row of an embedding.
    """
    known = {id(layer) for module in model.modules() if (layer := _named_output(module)) is not None}
    if known:
        return {name: module for name, module in model.named_modules() if id(module) in known}
    vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    inside = (
        {id(module) for block in blocks_of(model).values() for module in block.modules()} if vocabularies else set()
    )
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features in vocabularies and id(module) not in inside
    }


def bodies_of(model: nn.Module, layer: nn.Module) -> list[nn.Module]:
    """Return the submodules that hold all blocks and not an output layer; empty if there are none.

    Compiled as a whole, such a body returns hidden states, and the loss is computed outside of its graph.
    """
    blocks = {id(block) for block in blocks_of(model).values()}
    node = model
    while blocks:
        holders = [child for child in node.children() if blocks & {id(module) for module in child.modules()}]
        if any(isinstance(child, nn.ModuleList | nn.ModuleDict) or id(child) in blocks for child in holders):
            return []
        if not any(layer is module for child in holders for module in child.modules()):
            return holders
        if len(holders) != 1:
            return []
        node = holders[0]
    return []


def _named_output(module: nn.Module) -> Any:
    getter = getattr(module, "get_output_embeddings", None)
    if getter is None:
        return None
    try:
        return getter()
    except (NotImplementedError, AttributeError):
        return None


def install_output_layer(layer: nn.Module) -> None:
    """Make a linear layer return logits that are computed when they are read."""
    watch_optimizers()
    install(layer, lazy_forward)


def lazy_forward(layer: Any, hidden: Tensor) -> Tensor:
    """Return the logits, uncomputed where that can pay and is safe."""
    if torch.compiler.is_compiling() or not _is_lazy(layer, hidden):
        return cast(Tensor, type(layer).forward(layer, hidden))
    return lazy_linear(in_autocast(hidden), layer.weight, layer.bias)


lazy_forward.is_lazy_output = True  # type: ignore[attr-defined]


def _is_lazy(layer: Any, hidden: Tensor) -> bool:
    """Return whether to leave the logits uncomputed: for several tokens of a row, outside transforms, unhooked."""
    weight = layer.weight
    plain = type(hidden) is Tensor and not hidden.is_meta and hidden.dtype in _DTYPES and weight.dtype in _DTYPES
    if not plain or hidden.ndim < 2 or (hidden.ndim > 2 and hidden.shape[-2] < 2):
        return False
    if torch.is_inference_mode_enabled() or is_transformed() or type(layer.weight) not in (nn.Parameter, Tensor):
        return False
    return torch.is_autocast_enabled(hidden.device.type) or weight.dtype == hidden.dtype


def is_lazy_output(module: nn.Module) -> bool:
    """Return whether a module's logits stay uncomputed until they are read."""
    return getattr(getattr(vars(module).get("forward"), "__func__", None), "is_lazy_output", False)


@functools.cache
def watch_optimizers() -> None:
    """Mark logits that were not read as stale before any optimizer changes the weights. Registered once."""
    register_optimizer_step_pre_hook(mark_stale)
