"""A parameter's master in host memory: what the optimizer steps on, in fp32, with the way to the device and back."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from piledriver.optim.shards import local


class Master:
    """The fp32 master of one parameter on the host, and beside it what the device is sent.

    The optimizer holds `tensor`, which the rest of the engine finds as `parameter.own_part`; what sends and receives is
    `parameter.on_host`.
    """

    def __init__(self, parameter: nn.Parameter, device: torch.device, *, home: Any) -> None:
        self.parameter, self.device, self.home = parameter, device, home
        # What is on the host and will leave for a device may become the master as it is.
        host = local(parameter).detach().to("cpu", torch.float32, copy=device.type == "cpu")
        pin(host, owner=self)
        whole: Tensor = host
        if isinstance(parameter, DTensor):
            # Not `from_local`, which would move it to the device of the mesh.
            whole = DTensor(host, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        self.tensor = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        self.tensor.is_own_part = True  # type: ignore[attr-defined]
        parameter.own_part = self.tensor  # type: ignore[attr-defined]
        parameter.on_host = self  # type: ignore[attr-defined]
        self.was_given_out = False
        self.sent_version = self.tensor._version
        self.gradient: Tensor | None = None
        """Kept between steps, so that host memory is not asked for anew."""

    def __reduce__(self) -> tuple[Any, ...]:
        # A parameter that is pickled leaves its host memory here.
        return type(None), ()

    @torch.no_grad()
    def send(self) -> None:
        """The new weight to the device; nobody waits for it but the device."""
        local(self.parameter).copy_(local(self.tensor).to(self.device, non_blocking=True))
        self.sent()

    @property
    def is_stale(self) -> bool:
        """Whether the master may hold what the device has not seen: a checkpoint was loaded.

        Who was given a shard may write into it through an alias that no version counter tells of.
        """
        return self.was_given_out or self.sent_version != self.tensor._version

    def sent(self) -> None:
        """The device has the newest weight."""
        self.was_given_out, self.sent_version = False, self.tensor._version

    @torch.no_grad()
    def add_gradient(self, came: Tensor) -> None:
        """Put a gradient beside the master, in fp32, or add it to the one that is there."""
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


def pin(tensor: Tensor, *, owner: object) -> None:
    """Lock memory in place, as long as its owner lives, so that devices read it at full speed. Nothing without a GPU.

    torch's own pinned memory is rounded up to a power of two, which for large weights is up to twice what they need.
    """
    if not torch.cuda.is_available() or tensor.nbytes == 0 or tensor.is_pinned():
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = tensor.untyped_storage().data_ptr()
    if int(runtime.cudaHostRegister(address, tensor.untyped_storage().nbytes(), 0)) == 0:
        weakref.finalize(owner, runtime.cudaHostUnregister, address)
