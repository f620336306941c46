"""Room that a forward pass needs beside the weights: activations, logits and the key-value cache.

The pass is run on fake tensors, which have shapes and no memory; what is alive at once is counted. Attention counts as
the fused kernels compute it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.core.errors import PiledriverError
from piledriver.models import Transformer
from piledriver.models.model_size import cache_bytes_per_token
from piledriver.plan.blocks.torch_private import FakeTensorMode
from piledriver.plan.entry import config_of
from piledriver.plan.errors import PlanError
from piledriver.plan.placement.live_bytes import LiveBytes

WORKSPACE_BYTES = 256 << 20
"""Of kernel libraries and of memory that the allocator cannot use, on a GPU."""


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


@torch.no_grad()
def _activation_bytes(model: nn.Module, batch: int, length: int, dtype: torch.dtype) -> int:
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
