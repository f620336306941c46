"""Keep the residual stream in bf16: blocks of other models then pass on what ours do, half of what autocast keeps.

Under autocast a block adds 16-bit results to an fp32 stream, because the embedding is fp32. The input of each block is
cast instead; matrix products, norms and the update of the weights are what they were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from piledriver.engine.blocks import blocks_of

OPERATION = "residual stream"


def cast_block_inputs(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """Cast the first tensor that each block is called with from fp32; return the names of the blocks."""
    blocks = blocks_of(model)
    for block in blocks.values():
        block.register_forward_pre_hook(CastInput(dtype), with_kwargs=True)
    return list(blocks)


class CastInput:
    """A hook that casts a block's first argument, or its keyword `hidden_states`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._cast(args[0]), *args[1:]), kwargs
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": self._cast(kwargs["hidden_states"])}
        return args, kwargs

    def _cast(self, given: Any) -> Any:
        if isinstance(given, Tensor) and given.dtype == torch.float32 and torch.is_autocast_enabled(given.device.type):
            return given.to(self.dtype)
        return given
