"""Blocks of a model that trains: their parameters stay the same tensors, whose memory comes and goes.

Eviction frees the memory of a weight but keeps the tensor, so what the graph saved of it (views, transposes) is valid
again when the weight returns for the backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from piledriver.engine.offload.disk.block_file import DiskStore, Region
from piledriver.engine.offload.master import MasterWeight
from piledriver.engine.offload.pinned import host_copy
from piledriver.engine.offload.stream.link import Arrival, DeviceLink
from piledriver.engine.offload.tier import Tier
from piledriver.optim.shards import local


class StreamHome(NamedTuple):
    """Where streamed weights live."""

    device: torch.device
    dtype: torch.dtype | None
    """The compute dtype of matrices; None: as they are."""
    on_disk: set[nn.Parameter]
    store: DiskStore | None


class StreamedParameter:
    """One streamed parameter and its source in host memory or on disk."""

    def __init__(self, master: MasterWeight, home: StreamHome) -> None:
        self.master = master
        parameter = master.parameter
        # Vectors (norms, biases) stay fp32.
        dtype = home.dtype if home.dtype is not None and parameter.dim() > 1 else parameter.dtype
        # With zero 1 and 2 the master holds some rows, and the device computes with all of them.
        whole = master.part if master.first is None else local(parameter).detach()
        self.source, self.store = master.part, master.store
        if dtype != self.source.dtype or master.first is not None:
            self.store = home.store if parameter in home.on_disk else None
            if self.store is None:
                self.source = host_copy(whole, dtype, owner=self)
            else:
                self.source = self.store.empty(whole.shape, dtype)
                self.store.write(self.source, whole)
        self.target = self._make_target(dtype, home.device)
        self.nbytes = self.target.untyped_storage().nbytes()
        self.release()

    def _make_target(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the memory of the parameter without its version counter: the graph sees the same values again."""
        parameter = self.master.parameter
        parameter.data = torch.empty(parameter.shape, dtype=dtype, device=device)
        return parameter.data

    @property
    def is_master(self) -> bool:
        """Whether the source is the master weight itself."""
        return self.master.first is None and self.source.data_ptr() == self.master.part.data_ptr()

    @property
    def read(self) -> Region | None:
        """Where a source in a file is read from; None for one in host memory."""
        return None if self.store is None else self.store.region_of(self.source)

    def allocate(self) -> None:
        """Allocate the device memory."""
        self.target.untyped_storage().resize_(self.nbytes)

    def release(self) -> None:
        """Free the device memory."""
        self.target.untyped_storage().resize_(0)

    @torch.no_grad()
    def write(self, weight: Tensor) -> None:
        """Write a new weight, from any device, to the source."""
        if self.store is None:
            self.source.copy_(weight)
        else:
            self.store.write(self.source, weight)

    def refresh(self) -> None:
        """Take over a changed master weight, which holds all rows."""
        if not self.is_master:
            self.write(self.master.part)
        self.master.sent()


class StorageMemory:
    """A limit for the memory of blocks, which torch's allocator provides, with the link that fills it."""

    def __init__(self, device: torch.device, store: DiskStore | None) -> None:
        self.device = device
        self.link = DeviceLink(device, None if store is None else store.io)
        self.limit = self.used = 0

    def resize(self, nbytes: int) -> bool:
        """Set the limit."""
        self.limit = nbytes
        return True


class ParameterBlock:
    """The streamed parameters of one block: a `StreamedBlock`."""

    def __init__(self, name: str, weights: list[StreamedParameter], memory: StorageMemory) -> None:
        self.name, self.weights, self.memory = name, weights, memory
        self.nbytes = sum(weight.nbytes for weight in weights)
        self.tier = Tier.DISK if any(weight.store is not None for weight in weights) else Tier.HOST
        self._arrival: Arrival | None = None
        self._seconds: float | None = None
        self._has_memory = False

    def fetch(self) -> bool:
        """See `StreamedBlock`."""
        memory = self.memory
        if memory.used + self.nbytes > memory.limit:
            return False
        memory.used, self._has_memory = memory.used + self.nbytes, True
        try:
            for weight in self.weights:
                weight.allocate()
        except torch.OutOfMemoryError:
            self.evict()
            return False
        self.fetch_seconds()  # of the last fetch
        # The device may still compute with what this memory held before.
        is_cuda = memory.device.type == "cuda"
        after = [torch.cuda.current_stream(memory.device).record_event()] if is_cuda else []
        held = [one for one in self.weights if one.source.numel()]
        reads = [(region, one.target) for one in held if (region := one.read) is not None]
        copies = [(one.source, one.target) for one in held if one.store is None]
        self._arrival = memory.link.send(copies, reads, after=after)
        return True

    def wait(self) -> None:
        """See `StreamedBlock`."""
        if self._arrival is not None:
            self._arrival.wait()

    def evict(self) -> None:
        """See `StreamedBlock`. The memory of parameters is freed wherever it came from."""
        if self._arrival is not None and self._has_memory:
            self._arrival.settle()
        for weight in self.weights:
            weight.release()
        if self._has_memory:
            self.memory.used, self._has_memory = self.memory.used - self.nbytes, False

    def fetch_seconds(self) -> float | None:
        """See `StreamedBlock`."""
        if self._arrival is not None:
            self._seconds = self._arrival.seconds or self._seconds
        return 0.0 if not self.nbytes else self._seconds
