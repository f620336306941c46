"""torch's private API that this room uses, so that a torch upgrade is one file."""

from __future__ import annotations

from torch import nn
from torch.nn.attention.flex_attention import BlockMask, _mask_mod_signature, create_block_mask


def compiled_block_mask(attends: _mask_mod_signature, batch: int | None, length: int, device: str) -> BlockMask:
    """Build a block mask as `create_block_mask` does, compiled: torch has no public option for it."""
    return create_block_mask(attends, batch, None, length, length, device=device, _compile=True)


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a module's output is hooked; torch has no public way to ask."""
    return bool(module._forward_hooks)
