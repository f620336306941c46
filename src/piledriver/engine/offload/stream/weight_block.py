"""The weights of a streamed block: their layout in one piece of memory, their sources, how they enter a module.

Between uses a module holds meta tensors. In use it holds tensors over the memory of the stream; where autograd records,
copies of them, because the memory will hold other weights when the backward runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from piledriver.engine.offload.disk.extents import Extent
from piledriver.engine.offload.disk.host_buffer import HostBuffer
from piledriver.engine.offload.disk.reader import DirectReader
from piledriver.engine.offload.stream.arena import Arena, round_to_alignment
from piledriver.engine.offload.stream.link import Arrival, Copy, DeviceLink, Read
from piledriver.engine.offload.tier import Tier


@dataclass(frozen=True)
class Assembled:
    """A weight that is made of several tensors of files: stacked, transposed or cast."""

    parts: tuple[Extent, ...]
    make: Callable[[list[Tensor]], Tensor]


Source = Tensor | Extent | Assembled
Owner = tuple[nn.Module, str]


@dataclass(eq=False)
class StreamedTensor:
    """One weight of a block. Tied weights of a block are one, with several owners."""

    owners: list[Owner]
    absent: Tensor
    """What the modules hold between uses: a meta tensor."""
    source: Source
    is_shared: bool = False
    """Whether the source in host memory is that of a tied weight of another block, where it stays."""
    offset: int = 0
    """Of its bytes in the block."""
    part_offsets: list[int] = field(default_factory=list)
    """Of the parts of an assembled weight."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self.absent.numel() * self.absent.dtype.itemsize

    def put(self, value: Tensor) -> None:
        """Set the tensor that the owners hold."""
        for module, name in self.owners:
            if name in module._buffers:
                module._buffers[name] = value
            else:
                module._parameters[name] = value  # type: ignore[assignment]

    def load(self) -> Tensor:
        """Return the weight in host memory, read now if it is on disk."""
        if isinstance(self.source, Tensor):
            return self.source
        if isinstance(self.source, Extent):
            return read_extents([self.source])[0]
        return self.source.make(read_extents(self.source.parts)).contiguous()


def read_extents(extents: Sequence[Extent]) -> list[Tensor]:
    """Return the tensors of extents, in host memory."""
    made = [torch.empty(extent.shape, dtype=extent.dtype) for extent in extents]
    with DirectReader() as reader:
        reader.read(list(zip(extents, made, strict=True))).wait()
    return made


class StreamMemory:
    """Device memory for the blocks of a stream, with the link that fills it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.arena = Arena(0, device)
        self.link = DeviceLink(device)

    def resize(self, nbytes: int) -> bool:
        """Replace the memory, which must be unused; return False, with the old size, if there is not so much."""
        before = self.arena.nbytes
        if self.device.type == "cuda":
            self.link.synchronize()
            torch.cuda.current_stream(self.device).synchronize()
        self.arena = Arena(0, self.device)
        try:
            self.arena = Arena(nbytes, self.device)
        except (torch.OutOfMemoryError, MemoryError, OSError):
            self.arena = Arena(before, self.device)
            return False
        return True

    def close(self) -> None:
        """Free the memory and end the threads."""
        self.link.close()
        self.arena = Arena(0, self.device)


class WeightBlock:
    """The streamed weights of a module: a `StreamedBlock`."""

    def __init__(self, name: str, tensors: list[StreamedTensor], memory: StreamMemory) -> None:
        self.name, self.tensors, self.memory = name, tensors, memory
        self.records_gradients = False
        """Whether the next use is recorded by autograd."""
        self._base: int | None = None
        self._arrival: Arrival | None = None
        self._seconds: float | None = None
        self._packed: HostBuffer | None = None
        self._bound: dict[int, list[Tensor]] = {}
        self._bound_arena = memory.arena
        self._arrange()

    def _arrange(self) -> None:
        """Give each weight its place in the block, and pack those in host memory for one copy."""
        on_disk = any(not isinstance(tensor.source, Tensor) for tensor in self.tensors)
        on_host = any(isinstance(tensor.source, Tensor) for tensor in self.tensors)
        self.tier = Tier.DISK if on_disk else Tier.HOST
        # Weights in host memory are used where they are if the host computes.
        self._in_place = self.memory.device.type == "cpu"
        at = self._packed_bytes = 0
        for tensor in sorted(self.tensors, key=lambda one: one.is_shared):
            if not (self._in_place and isinstance(tensor.source, Tensor)):
                tensor.offset, at = at, at + round_to_alignment(tensor.nbytes)
                self._packed_bytes = self._packed_bytes if tensor.is_shared else at
        for tensor in self.tensors:
            tensor.part_offsets = []
            for part in tensor.source.parts if isinstance(tensor.source, Assembled) else ():
                tensor.part_offsets.append(at)
                at += round_to_alignment(part.nbytes)
        self.nbytes = at
        if on_host and not on_disk and not self._in_place:
            self._packed = pack_on_host([one for one in self.tensors if not one.is_shared], self._packed_bytes)

    def fetch(self) -> bool:
        """See `StreamedBlock`."""
        if not self.nbytes:
            return True
        base = self.memory.arena.take(self.nbytes)
        if base is None:
            return False
        self._base = base
        self.fetch_seconds()  # of the last fetch
        copies, reads = self._jobs(base)
        is_assembled = any(isinstance(tensor.source, Assembled) for tensor in self.tensors)
        self._arrival = self.memory.link.send(
            copies,
            reads,
            after=self.memory.arena.events(base, self.nbytes),
            assemble=(lambda: self._make_parts(base)) if is_assembled else None,
        )
        return True

    def _jobs(self, base: int) -> tuple[list[Copy], list[Read]]:
        copies: list[Copy] = []
        reads: list[Read] = []
        if self._packed is not None:
            packed = self._packed.bytes[: self._packed_bytes]
            copies.append((packed, self._span(base, 0, self._packed_bytes)))
        for tensor in self.tensors:
            target = self._span(base, tensor.offset, tensor.nbytes)
            if isinstance(tensor.source, Extent):
                reads.append((tensor.source, target))
            elif isinstance(tensor.source, Assembled):
                for part, offset in zip(tensor.source.parts, tensor.part_offsets, strict=True):
                    reads.append((part, self._span(base, offset, part.nbytes)))
            elif not self._in_place and (self._packed is None or tensor.is_shared):
                copies.append((tensor.source.detach().contiguous().view(-1).view(torch.uint8), target))
        return copies, reads

    def _make_parts(self, base: int) -> None:
        """Make assembled weights from their parts; runs in a thread, on the copy stream."""
        for tensor in self.tensors:
            if isinstance(tensor.source, Assembled):
                parts = [
                    self._tensor(base + offset, part.shape, part.dtype)
                    for part, offset in zip(tensor.source.parts, tensor.part_offsets, strict=True)
                ]
                target = self._tensor(base + tensor.offset, tuple(tensor.absent.shape), tensor.absent.dtype)
                target.copy_(tensor.source.make(parts))

    def wait(self) -> None:
        """See `StreamedBlock`."""
        if self._arrival is not None:
            self._arrival.wait()
        self._bind()

    def evict(self) -> None:
        """See `StreamedBlock`."""
        for tensor in self.tensors:
            tensor.put(tensor.absent)
        if self._base is None:
            return
        if self._arrival is not None:
            self._arrival.settle()
        event = None
        if self.memory.device.type == "cuda":
            event = torch.cuda.current_stream(self.memory.device).record_event()
        self.memory.arena.free(self._base, event)
        self._base = None

    def fetch_seconds(self) -> float | None:
        """See `StreamedBlock`."""
        if self._arrival is not None:
            self._seconds = self._arrival.seconds or self._seconds
        return 0.0 if not self.nbytes else self._seconds

    def _span(self, base: int, offset: int, nbytes: int) -> Tensor:
        return self.memory.arena.memory[base + offset : base + offset + nbytes]

    def _tensor(self, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor over the memory; not a view of it, so that compiled code takes it as any other weight."""
        memory = self.memory.arena.memory
        first = memory.storage_offset() + start
        made = torch.empty(0, dtype=dtype, device=memory.device)
        made.set_(memory.untyped_storage(), first // dtype.itemsize, torch.Size(shape))  # type: ignore[call-overload]
        return made

    def _bind(self) -> None:
        for tensor, value in zip(self.tensors, self._values(), strict=True):
            if self.records_gradients and not (self._in_place and isinstance(tensor.source, Tensor)):
                value = value.clone()
            if isinstance(tensor.absent, nn.Parameter):
                trains = self.records_gradients and tensor.absent.requires_grad
                value = nn.Parameter(value, requires_grad=trains)
            tensor.put(value)

    def _values(self) -> list[Tensor]:
        """Return the weights over the memory; the same tensors when the block comes back to the same place."""
        if self._bound_arena is not self.memory.arena:
            self._bound_arena = self.memory.arena
            self._bound.clear()
        base = -1 if self._base is None else self._base
        if base not in self._bound:
            self._bound[base] = [self._value(tensor) for tensor in self.tensors]
        return self._bound[base]

    def _value(self, tensor: StreamedTensor) -> Tensor:
        if self._in_place and isinstance(tensor.source, Tensor):
            return tensor.source.detach()
        assert self._base is not None
        return self._tensor(self._base + tensor.offset, tuple(tensor.absent.shape), tensor.absent.dtype)

    def forget(self, module: nn.Module) -> list[StreamedTensor]:
        """Stop streaming a module's own weights; return them. The block must not be in use."""
        self.evict()
        left = [tensor for tensor in self.tensors if any(owner is module for owner, _ in tensor.owners)]
        self.tensors = [tensor for tensor in self.tensors if tensor not in left]
        self._bound.clear()
        for tensor in left:
            if isinstance(tensor.source, Tensor) and self._packed is not None:
                tensor.source = tensor.source.clone()
        if not self.tensors:
            self.nbytes, self._packed = 0, None
        return left

    def copied(self, memory: StreamMemory, memo: dict[int, Any]) -> WeightBlock:
        """Return the block of a deep copy of its modules, with the same sources."""
        tensors = [
            StreamedTensor(
                [(copy.deepcopy(module, memo), name) for module, name in tensor.owners],
                copy.deepcopy(tensor.absent, memo),
                tensor.source,
                tensor.is_shared,
            )
            for tensor in self.tensors
        ]
        return WeightBlock(self.name, tensors, memory)


def pack_on_host(tensors: list[StreamedTensor], nbytes: int) -> HostBuffer:
    """Return weights in host memory packed as in their block, pinned if there is a GPU; they become views of it."""
    packed = HostBuffer(nbytes)
    for tensor in tensors:
        assert isinstance(tensor.source, Tensor)
        place = packed.tensor(tensor.offset, tuple(tensor.absent.shape), tensor.absent.dtype)
        place.copy_(tensor.source.detach())
        tensor.source = place
    return packed
