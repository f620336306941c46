"""A parameter's master in host memory: what the optimizer steps on, in fp32, with the way to the device and back."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from piledriver.optim.shards import local

# Below this a lock costs more than it gains.
_SMALLEST_PINNED = 1 << 16


class MasterWeight:
    """The fp32 master of one parameter on the host, and beside it what the device is sent.

    The optimizer holds `tensor`, which the rest of the engine finds as `parameter.optimizer_shard`; transfers go
    through `parameter.on_host`.
    """

    def __init__(self, parameter: nn.Parameter, device: torch.device, *, home: Any) -> None:
        self.parameter, self.device, self.home = parameter, device, home
        part = local(parameter).detach()
        host = host_copy(part, torch.float32, owner=self)
        if part.device.type == "cpu" != device.type and not isinstance(parameter, DTensor):
            # The weight itself will leave for the device: until then it need not be on the host twice.
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


def host_copy(tensor: Tensor, dtype: torch.dtype, *, owner: object) -> Tensor:
    """A copy in host memory, locked in place as long as its owner lives where a GPU gains from that.

    torch's own pinned memory is rounded up to a power of two, which for large weights is up to twice what they need.
    So large ones get page_aligned_empty of their own, and these are registered with the driver.
    """
    if not torch.cuda.is_available() or tensor.numel() * dtype.itemsize < _SMALLEST_PINNED:
        return tensor.detach().to("cpu", dtype, copy=True)
    host = page_aligned_empty(tensor.shape, dtype)
    host.copy_(tensor.detach())
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)) == 0:
        weakref.finalize(owner, runtime.cudaHostUnregister, host.data_ptr())
    return host


def page_aligned_empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor that shares no page of memory with another.

    >>> page_aligned_empty(torch.Size((2, 3)), torch.bfloat16).fill_(1).sum()
    tensor(6., dtype=torch.bfloat16)
    """
    memory = mmap.mmap(-1, shape.numel() * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
