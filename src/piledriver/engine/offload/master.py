"""fp32 master weights in host memory, which the optimizer steps on, and their transfers."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from piledriver.optim.shards import local

# Smaller tensors are not worth pinning.
_SMALLEST_PINNED = 1 << 16


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


def host_copy(tensor: Tensor, dtype: torch.dtype, *, owner: object) -> Tensor:
    """Return a copy in host memory, pinned while its owner lives if there is a GPU.

    torch rounds pinned memory up to a power of two, up to twice the size; so pages are allocated and registered here.
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
    """Return an uninitialised tensor on pages of its own.

    >>> page_aligned_empty(torch.Size((2, 3)), torch.bfloat16).fill_(1).sum()
    tensor(6., dtype=torch.bfloat16)
    """
    memory = mmap.mmap(-1, shape.numel() * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
