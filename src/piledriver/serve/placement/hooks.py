"""Hooks around a module's forward.

A hook replaces `module.forward` and keeps the original as `_old_forward`, under the attribute `_hf_hook`: transformers
and diffusers look for these names.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn


class ModelHook:
    """Base class: changes nothing before or after a module's forward."""

    no_grad = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Prepare the module when the hook is attached; return it."""
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments that forward receives."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the output that the caller receives."""
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Undo `init_hook` when the hook is removed; return the module."""
        return module


class SequentialHook(ModelHook):
    """Several hooks, applied in order."""

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Attach each hook in order."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Pass the arguments through each hook in order."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Pass the output through each hook in order."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Detach each hook in order."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Attach a hook to a module in place of the present one, or after it with `append`; return the module."""
    held: Any = module
    original = held._old_forward if hasattr(module, "_hf_hook") and hasattr(module, "_old_forward") else module.forward
    held._old_forward = original
    module = hook.init_hook(module)
    held._hf_hook = SequentialHook(held._hf_hook, hook) if append and hasattr(module, "_hf_hook") else hook
    module.forward = functools.update_wrapper(functools.partial(_hooked_forward, module), original)
    return module


def _hooked_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = module._hf_hook.pre_forward(module, *args, **kwargs)
    if module._hf_hook.no_grad:
        with torch.no_grad():
            output = module._old_forward(*args, **kwargs)
    else:
        output = module._old_forward(*args, **kwargs)
    return module._hf_hook.post_forward(module, output)


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove a module's hook, with `recurse` those of its submodules too; return the module."""
    held: Any = module
    if hasattr(module, "_hf_hook"):
        held._hf_hook.detach_hook(module)
        del held._hf_hook
    if hasattr(module, "_old_forward"):
        module.__dict__.pop("_old_forward")
        # Deleting the attribute exposes the class's forward; a forward that the user had assigned is restored.
        replaced = module.__dict__.pop("forward", None)
        original = getattr(replaced, "__wrapped__", None)
        if original is not None and getattr(original, "__func__", None) is not type(module).forward:
            module.forward = original
    if recurse:
        for child in module.children():
            remove_hook_from_module(child, recurse)
    return module


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and of all its submodules."""
    remove_hook_from_module(module, recurse=True)
