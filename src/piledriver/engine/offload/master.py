"""fp32 master weights in host memory or in a file, which the optimizer steps on, and their transfers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from piledriver.engine.offload.disk.block_file import DiskStore
from piledriver.engine.offload.pinned import host_copy
from piledriver.optim.shards import local


class MasterWeight:
    """The fp32 master weight of one parameter, or of the rows of it that this rank steps on (zero 1 and 2).

    The optimizer holds `tensor`, which the rest of the engine finds as `parameter.optimizer_shard`; transfers go
    through `parameter.on_host`. With a store, `tensor` lies in a file: reading it reads the disk.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        device: torch.device,
        *,
        home: Any,
        store: DiskStore | None = None,
        gradient_store: DiskStore | None = None,
        pin: bool = True,
    ) -> None:
        self.parameter, self.device, self.home = parameter, device, home
        self.store, self.gradient_store = store, gradient_store
        rows: DTensor | None = getattr(parameter, "optimizer_shard", None)
        self.first: int | None = None
        """With zero 1 and 2: the first element of this rank's rows in the local parameter."""
        part, spec = local(parameter).detach(), getattr(parameter, "_spec", None)
        if rows is not None:
            self.first, spec = int(local(rows).storage_offset() - part.storage_offset()), rows._spec
            part = local(rows).detach()
        host = self._copy(part, pin)
        if part.device.type == "cpu" != device.type and spec is None:
            # The weight will move to the device: do not hold it twice on the host until then.
            parameter.data = host
        # Not `from_local`, which would move it to the device of the mesh.
        whole: Tensor = host if spec is None else DTensor(host, spec, requires_grad=False)  # type: ignore[no-untyped-call]
        self.tensor = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        self.tensor.is_optimizer_shard = True  # type: ignore[attr-defined]
        self.tensor.master_weight = self  # type: ignore[attr-defined]
        parameter.optimizer_shard = self.tensor  # type: ignore[attr-defined]
        parameter.on_host = self  # type: ignore[attr-defined]
        self.stepper: Any = None
        """What steps on this weight in the backward, None where `optimizer.step` does."""
        self.was_given_out = False
        self.sent_version = self.tensor._version
        self.gradient: Tensor | None = None
        """Gradient buffer, reused between steps."""

    def _copy(self, part: Tensor, pin: bool) -> Tensor:
        if self.store is None:
            return host_copy(part, torch.float32, owner=self, pin=pin)
        if part.dtype == torch.float32 and self.store.find(part) is not None:
            return part
        kept = self.store.empty(part.shape, torch.float32)
        self.store.write(kept, part)
        return kept

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled parameter has no master.
        return type(None), ()

    @property
    def part(self) -> Tensor:
        """The local tensor of the master weight."""
        return local(self.tensor).detach()

    @property
    def device_part(self) -> Tensor:
        """What the master is sent to: the local parameter, or this rank's rows of it."""
        whole = local(self.parameter).detach()
        if self.first is None:
            return whole
        return whole.view(-1)[self.first : self.first + self.part.numel()].view(self.part.shape)

    @torch.no_grad()
    def send(self) -> None:
        """Copy the new weight to the device, asynchronously."""
        self.device_part.copy_(self.part.to(self.device, non_blocking=True))
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
            self.gradient = self._empty_gradient()
        if self.gradient_store is None:
            self.gradient.copy_(came)
        else:
            self.gradient_store.write(self.gradient, came)
        self.tensor.grad = self.wrapped(self.gradient)

    def _empty_gradient(self) -> Tensor:
        shape = self.part.shape
        if self.gradient_store is not None:
            return self.gradient_store.empty(shape, torch.float32)
        spare: list[Tensor] = self.home.spare_gradients.get(shape, [])
        return spare.pop() if spare else torch.empty(shape)

    def drop_gradient(self) -> None:
        """Forget the gradient; its memory serves the next weight of this shape, a file keeps its region."""
        if self.gradient_store is None and self.gradient is not None:
            self.home.spare_gradients.setdefault(self.gradient.shape, []).append(self.gradient)
            self.gradient = None
        self.tensor.grad = None

    def wrapped(self, part: Tensor) -> Tensor:
        """Return a local tensor with the placements of the master weight."""
        if not isinstance(self.tensor, DTensor):
            return part
        made: Tensor = DTensor(part, self.tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return made

    def empty_state(self, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised optimizer state of the weight's shape, in its tier."""
        shape = self.part.shape
        if self.store is None:
            return self.wrapped(torch.empty(shape, dtype=dtype))
        return self.wrapped(self.store.empty(shape, dtype))
