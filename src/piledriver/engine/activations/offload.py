"""Offload saved activations to host memory, and prefetch them one block before the backward needs them.

Copies run on their own stream through pinned memory, overlapped with compute. A tensor that a block saves several times
is copied once; small tensors, and parameters with their casts and transposes, stay on the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from piledriver.optim.shards import local

# Smaller tensors are not worth a copy.
SMALLEST_BYTES = 1 << 20

# Autograd nodes of casts and transposes of a parameter.
_SAME_VALUES = ("TBackward0", "TransposeBackward0", "PermuteBackward0", "ToCopyBackward0", "ViewBackward0")


class ActivationStore:
    """The offloaded activations of one model's blocks."""

    def __init__(self, smallest_bytes: int | None = None) -> None:
        self.smallest_bytes = SMALLEST_BYTES if smallest_bytes is None else smallest_bytes
        self.bytes_offloaded = 0
        """Total since the store was created."""
        self.newest: weakref.ref[BlockActivations] | None = None
        """The block that the backward needs first."""
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """Return the copy stream of a device, None on the CPU."""
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationStore:
        memo[id(self)] = made = ActivationStore(self.smallest_bytes)
        return made


class KeepOnHost:
    """A forward whose saved tensors go to the store; `first` marks the first block of a forward."""

    stays_outside_compiled = True

    def __init__(self, forward: Callable[..., Any], store: ActivationStore, *, first: bool = False) -> None:
        self.forward, self.store, self.first = forward, store, first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        block = BlockActivations(self.store, None if self.first else self.store.newest)
        with torch.autograd.graph.saved_tensors_hooks(block.pack, _unpack):
            out = self.forward(*args, **kwargs)
        block.close()
        return out


class BlockActivations:
    """The saved tensors of one block in one forward. Only the graph holds them, so used ones are freed."""

    def __init__(self, store: ActivationStore, before: weakref.ref[BlockActivations] | None) -> None:
        self.store, self.before = store, before
        self.tensors: list[weakref.ref[HostTensor]] = []
        self._packed: dict[Any, tuple[StorageWeakRef, HostTensor]] = {}

    def pack(self, tensor: Tensor) -> Tensor | PackedTensor:
        """Offload a saved tensor, unless it should stay on the device."""
        if tensor.layout != torch.strided or is_of_parameter(tensor):
            return tensor
        part = local(tensor.detach())
        size = part.numel() * part.element_size()
        if size < self.store.smallest_bytes or any(
            step == 0 and length > 1 for step, length in zip(part.stride(), part.shape, strict=True)
        ):
            return tensor
        storage = part.untyped_storage()
        key = (storage._cdata, part.storage_offset(), part.shape, part.stride(), part.dtype, tensor._version)
        known = self._packed.get(key)
        if known is None or known[0].expired():  # type: ignore[no-untyped-call]
            known = (StorageWeakRef(storage), HostTensor(self, part))  # type: ignore[no-untyped-call]
            self._packed[key] = known
            self.tensors.append(weakref.ref(known[1]))
            self.store.bytes_offloaded += size
        return PackedTensor(known[1], tensor._spec if isinstance(tensor, DTensor) else None)

    def close(self) -> None:
        """End the forward: no more tensors are saved."""
        if self.tensors:
            self.store.newest = weakref.ref(self)
        self._packed.clear()

    def fetch(self) -> None:
        """Start copying back what the graph still holds."""
        for reference in self.tensors:
            held = reference()
            if held is not None:
                held.fetch()


class HostTensor:
    """One tensor in host memory, and its copy back on the device."""

    def __init__(self, block: BlockActivations, tensor: Tensor) -> None:
        self.block, self.device = block, tensor.device
        self.back: Tensor | None = None
        self._ready: torch.cuda.Event | None = None
        stream = block.store.stream(tensor.device)
        if stream is None:
            self.host = tensor.clone()
            return
        self.host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)
        # Its memory must not be reused before the copy has finished.
        tensor.record_stream(stream)

    def fetch(self) -> None:
        """Start copying it back."""
        if self.back is not None:
            return
        stream = self.block.store.stream(self.device)
        if stream is None:
            self.back = self.host
            return
        with torch.cuda.stream(stream):
            self.back = self.host.to(self.device, non_blocking=True)
            self._ready = stream.record_event()

    def take(self) -> Tensor:
        """Return the tensor on its device; start fetching the rest of its block and the previous block."""
        self.block.fetch()
        before = self.block.before() if self.block.before is not None else None
        self.block.before = None
        if before is not None:
            before.fetch()
        assert self.back is not None
        if self._ready is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(self._ready)
            self.back.record_stream(current)
        return self.back


class PackedTensor:
    """What the graph holds in place of a tensor; several may share one `HostTensor`."""

    def __init__(self, held: HostTensor, spec: Any) -> None:
        self.held, self.spec = held, spec


def _unpack(packed: Tensor | PackedTensor) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    part = packed.held.take()
    return part if packed.spec is None else DTensor(part, packed.spec, requires_grad=False)  # type: ignore[no-untyped-call]


def is_of_parameter(tensor: Tensor) -> bool:
    """Whether a saved tensor is a parameter, a view of one, or a cast or transpose of one."""
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return True
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _SAME_VALUES and node.next_functions:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"
