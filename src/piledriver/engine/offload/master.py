"""fp32 master weights in host memory, which the optimizer steps on, and their transfers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from piledriver.engine.offload.pinned import host_copy
from piledriver.optim.shards import local


class MasterWeight:
    """The fp32 master weight of one parameter on the host.

    The optimizer holds `tensor`, which the rest of the engine finds as `parameter.optimizer_shard`; transfers go
    through `parameter.on_host`.
    """

    def __init__(self, parameter: nn.Parameter, device: torch.device, *, home: Any) -> None:
        self.parameter, self.device, self.home = parameter, device, home
        part = local(parameter).detach()
        host = host_copy(part, torch.float32, owner=self)
        if part.device.type == "cpu" != device.type and not isinstance(parameter, DTensor):
            # The weight will move to the device: do not hold it twice on the host until then.
            parameter.data = host
        whole: Tensor = host
        if isinstance(parameter, DTensor):
            # Not `from_local`, which would move it to the device of the mesh.
            whole = DTensor(host, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        self.tensor = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        self.tensor.is_optimizer_shard = True  # type: ignore[attr-defined]
        parameter.optimizer_shard = self.tensor  # type: ignore[attr-defined]
        parameter.on_host = self  # type: ignore[attr-defined]
        self.was_given_out = False
        self.sent_version = self.tensor._version
        self.gradient: Tensor | None = None
        """Gradient buffer, reused between steps."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled parameter has no master.
        return type(None), ()

    @torch.no_grad()
    def send(self) -> None:
        """Copy the new weight to the device, asynchronously."""
        local(self.parameter).copy_(local(self.tensor).to(self.device, non_blocking=True))
        self.sent()

    @property
    def is_stale(self) -> bool:
        """Whether the master may differ from the device weight, because a checkpoint was loaded.

        A tensor given out may be written through an alias, without a version change.
        """
        return self.was_given_out or self.sent_version != self.tensor._version

    def sent(self) -> None:
        """Record that the device has the newest weight."""
        self.was_given_out, self.sent_version = False, self.tensor._version

    @torch.no_grad()
    def add_gradient(self, came: Tensor) -> None:
        """Add a gradient to the master's, in fp32."""
        if self.tensor.grad is not None:
            local(self.tensor.grad).add_(came)
            return
        if self.gradient is None:
            self.gradient = torch.empty_like(local(self.tensor).detach())
        self.gradient.copy_(came)
        wrapped: Tensor = self.gradient
        if isinstance(self.tensor, DTensor):
            wrapped = DTensor(self.gradient, self.tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        self.tensor.grad = wrapped
