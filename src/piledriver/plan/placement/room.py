"""Room that a forward pass needs beside the weights: activations, logits and the key-value cache.

The pass is run on fake tensors, which have shapes and no memory; what is alive at once is counted. Attention counts as
the fused kernels compute it. Of blocks of one kind only a few are run: an operator on fake tensors takes longer than a
small one on real ones, and a deep model has thousands.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.core.errors import PiledriverError
from piledriver.engine.blocks import block_kind, blocks_of
from piledriver.models import Transformer
from piledriver.models.model_size import cache_bytes_per_token
from piledriver.plan.errors import PlanError
from piledriver.plan.model_config import config_of
from piledriver.plan.placement.live_bytes import LiveBytes
from piledriver.plan.placement.torch_private import FakeTensorMode

WORKSPACE_BYTES = 256 << 20
"""Of kernel libraries and of memory that the allocator cannot use, on a GPU."""
_FEW = 3
"""Blocks of one kind that are run at most."""


@dataclass(frozen=True)
class Room:
    """Bytes beside the weights, for one batch and length."""

    activations: int
    """Of the device that computes, at their peak, logits included."""
    cache: int
    """Of the key-value cache of all blocks: each device holds that of the blocks it runs."""


def inference_room(model: nn.Module, batch: int, length: int, dtype: torch.dtype | None = None) -> Room:
    """Return the room of a forward pass over `batch` sequences of `length` tokens, with their key-value cache.

    >>> from piledriver.models import ModelConfig
    >>> with torch.device("meta"):
    ...     model = Transformer(ModelConfig(vocab_size=32, dim=16, layers=2, heads=2))
    >>> inference_room(model, 1, 8).cache == 2 * 2 * 16 * 8 * 4
    True
    """
    kind = dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    cache = 0
    with contextlib.suppress(PiledriverError, LookupError, TypeError):
        cache = batch * length * cache_bytes_per_token(config_of(model)[0], kind.itemsize)
    return Room(_activation_bytes(model, batch, length, kind), cache)


def _activation_bytes(model: nn.Module, batch: int, length: int, dtype: torch.dtype) -> int:
    kinds = Counter(_kind(name, block) for name, block in blocks_of(model).items())
    most = max(kinds.values(), default=0)
    if most > _FEW:
        peaks = []
        with contextlib.suppress(PlanError):  # of a model that counts its blocks
            for count in (_FEW - 1, _FEW):
                with _shortened(model, count):
                    peaks.append(_peak(model, batch, length, dtype))
            # What one more block of each kind adds is what blocks keep until the end, usually nothing.
            return peaks[1] + (most - _FEW) * max(peaks[1] - peaks[0], 0)
    return _peak(model, batch, length, dtype)


def _kind(name: str, block: nn.Module) -> Hashable:
    """Return a key that blocks with the same parameters and settings share; their own index does not count."""
    index = name.rpartition(".")[2]
    settings = tuple(
        (path, key, "index" if type(value) is int and str(value) == index else value)
        for path, module in block.named_modules()
        for key, value in sorted(vars(module).items())
        if isinstance(value, str | int | None)
    )
    return block_kind(block), settings


@contextlib.contextmanager
def _shortened(model: nn.Module, count: int) -> Iterator[None]:
    """Leave, within it, only the first blocks of each kind in the model."""
    parents: dict[str, list[tuple[str, nn.Module]]] = {}
    seen: Counter[Hashable] = Counter()
    for name, block in blocks_of(model).items():
        parent, _, key = name.rpartition(".")
        kept = parents.setdefault(parent, [])
        kind = _kind(name, block)
        seen[kind] += 1
        if seen[kind] <= count:
            kept.append((key, block))
    held = [(stack, stack._modules) for stack in map(model.get_submodule, parents)]
    try:
        for (stack, _), kept in zip(held, parents.values(), strict=True):
            # A list is indexed by the place in it, a dict by name.
            named = isinstance(stack, nn.ModuleDict)
            stack._modules = {key if named else str(place): block for place, (key, block) in enumerate(kept)}
        yield
    finally:
        for stack, modules in held:
            stack._modules = modules


@torch.no_grad()
def _peak(model: nn.Module, batch: int, length: int, dtype: torch.dtype) -> int:
    options: dict[str, Any] = {} if isinstance(model, Transformer) else {"use_cache": False}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        state = {name: _fake(tensor, dtype) for name, tensor in _all_tensors(model).items()}
        tokens = torch.zeros(batch, length, dtype=torch.long)
        counter = LiveBytes(state.values())
        try:
            with counter:
                try:
                    out = torch.func.functional_call(model, state, (tokens,), options)
                except TypeError:  # a model that takes no `use_cache`
                    out = torch.func.functional_call(model, state, (tokens,))
        except Exception as error:
            raise PlanError(
                f"cannot count the activations of a {type(model).__name__}: {error}",
                fix="pass max_memory with room for them, and neither batch nor length",
            ) from error
        del out, mode
    return counter.peak


def _all_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _fake(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    kind = dtype if tensor.is_floating_point() and tensor.dtype.itemsize > 1 else tensor.dtype
    return torch.empty(tensor.shape, dtype=kind)
