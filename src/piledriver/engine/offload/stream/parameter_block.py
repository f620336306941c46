"""Blocks of a model that trains: their parameters stay the same tensors, whose memory comes and goes.

Eviction frees the memory of a weight but keeps the tensor, so what the graph saved of it (views, transposes) is valid
again when the weight returns for the backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from piledriver.engine.offload.disk.block_file import DiskStore
from piledriver.engine.offload.master import MasterWeight
from piledriver.engine.offload.pinned import host_copy
from piledriver.engine.offload.stream.link import Arrival, DeviceLink
from piledriver.engine.offload.tier import Tier


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
        self.source, self.store = master.part, master.store
        if dtype != self.source.dtype:
            self.store = home.store if parameter in home.on_disk else None
            if self.store is None:
                self.source = host_copy(master.part, dtype, owner=self)
            else:
                self.source = self.store.empty(parameter.shape, dtype)
                self.store.write(self.source, master.part)
        parameter.data = torch.empty(parameter.shape, dtype=dtype, device=home.device)
        # The memory of the parameter without its version counter: the graph sees the same values when it returns.
        self.target = parameter.data
        self.nbytes = parameter.untyped_storage().nbytes()
        self.release()

    @property
    def is_master(self) -> bool:
        """Whether the source is the master weight itself."""
        return self.source.data_ptr() == self.master.part.data_ptr()

    def allocate(self) -> None:
        """Allocate the parameter's memory."""
        self.master.parameter.untyped_storage().resize_(self.nbytes)

    def release(self) -> None:
        """Free the parameter's memory."""
        self.master.parameter.untyped_storage().resize_(0)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over a changed master weight."""
        if not self.is_master:
            if self.store is None:
                self.source.copy_(self.master.part)
            else:
                self.store.write(self.source, self.master.part)
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
        reads = [(one.store.region_of(one.source), one.target) for one in self.weights if one.store is not None]
        copies = [(one.source, one.target) for one in self.weights if one.store is None]
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
