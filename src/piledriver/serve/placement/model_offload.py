"""Keep a whole model on the CPU until its forward, for pipelines of several models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from piledriver.runtime.collectives.nested import send_to_device
from piledriver.serve.placement.hooks import ModelHook, remove_hook_from_module


class CpuOffload(ModelHook):
    """Moves a model to the execution device for its forward, after the previous model returned to the CPU."""

    def __init__(self, execution_device: Any = None, prev_module_hook: UserCpuOffloadHook | None = None) -> None:
        self.prev_module_hook = prev_module_hook
        default = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self.execution_device = execution_device if execution_device is not None else default

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the model to the CPU."""
        return module.to("cpu")

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Offload the previous model, then move this one and its inputs to the execution device."""
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        module.to(self.execution_device)
        return send_to_device(args, self.execution_device), send_to_device(kwargs, self.execution_device)


class UserCpuOffloadHook:
    """A handle with which the caller offloads a model or removes its hook."""

    def __init__(self, model: nn.Module, hook: ModelHook) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Move the model to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Remove the hook."""
        remove_hook_from_module(self.model)
