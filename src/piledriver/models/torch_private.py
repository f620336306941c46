"""torch's private API that this room uses, so that a torch upgrade is one file."""

from __future__ import annotations

from torch import nn


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether a module's output is hooked; torch has no public way to ask."""
    return bool(module._forward_hooks)
