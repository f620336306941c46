"""Options of torch's own mechanisms that a layout does not describe: DDP, autocast, torch.compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

CommunicationHook = Literal["no", "fp16", "bf16", "power_sgd", "batched_power_sgd"]


@dataclass(frozen=True, kw_only=True)
class DDPOptions:
    """Options of torch's `DistributedDataParallel`, for `Layout(reducer="ddp")`."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of its constructor."""
    hook: CommunicationHook = "no"
    """Compression of gradients on their way between ranks."""
    wrapper: Literal["no", "fp16", "bf16"] = "no"
    """Compression around the hook."""
    hook_state: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `PowerSGDState`."""

    @property
    def rebuilds_buckets(self) -> bool:
        """Whether DDP rebuilds its buckets after the first backward."""
        return not (self.arguments.get("static_graph") or self.arguments.get("find_unused_parameters"))


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What `apply` passes through to torch."""

    ddp: DDPOptions = field(default_factory=DDPOptions)
    autocast: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `torch.autocast` beside device and dtype."""
    compile: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of `torch.compile`."""
