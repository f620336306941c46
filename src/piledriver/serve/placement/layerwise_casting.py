"""Layerwise casting: store the weights of each layer in a small type, compute in a larger one."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from piledriver.serve.placement.hooks import ModelHook, add_hook_to_module

# The layers that are cast; norms and embeddings keep their type.
SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)


class LayerwiseCastingHook(ModelHook):
    """Casts a layer to its compute type before forward and to its storage type after it."""

    def __init__(self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool = False) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast to the storage type."""
        return module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Cast to the compute type."""
        module.to(dtype=self.compute_dtype, non_blocking=self.non_blocking)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Cast to the storage type."""
        module.to(dtype=self.storage_dtype, non_blocking=self.non_blocking)
        return output


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: Any = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
    _prefix: str = "",
) -> None:
    """Attach a `LayerwiseCastingHook` to every supported layer that no pattern and no class excludes."""
    patterns = [skip_modules_pattern] if isinstance(skip_modules_pattern, str) else skip_modules_pattern or ()
    if skip_modules_classes is not None and isinstance(module, skip_modules_classes):
        return
    if any(re.search(pattern, _prefix) for pattern in patterns):
        return
    if isinstance(module, SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING):
        add_hook_to_module(module, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True)
        return
    for name, child in module.named_children():
        attach_layerwise_casting_hooks(
            child,
            storage_dtype,
            compute_dtype,
            skip_modules_pattern,
            skip_modules_classes,
            non_blocking,
            f"{_prefix}.{name}" if _prefix else name,
        )
