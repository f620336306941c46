"""Stream block weights to the device while they compute, prefetching the next block.

Eviction frees the memory of a weight but keeps the tensor, so what the graph saved of it (views, transposes) is valid
again when the weight returns for the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from piledriver.engine.offload.disk.block_file import DiskStore
from piledriver.engine.offload.disk.direct_io import Transfer, whole_pages
from piledriver.engine.offload.master import MasterWeight
from piledriver.engine.offload.pinned import host_copy
from piledriver.engine.offload.stepping.pipeline import Slot, Staged
from piledriver.engine.torch_private import current_backward


class StreamedBlocks:
    """The blocks of one model, in order. At most two of them are on the device."""

    def __init__(self, blocks: list[nn.Module], masters: dict[nn.Parameter, MasterWeight], home: StreamHome) -> None:
        self.weights = [
            [StreamedWeight(masters[p], home) for p in parameters if p in masters]
            for parameters in streamed_parameters(blocks)
        ]
        self.device = home.device
        self._ahead = ReadAhead(home.store) if home.store is not None else None
        self.stream: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._backward: int | None = None
        self._handles = [
            handle
            for number, block in enumerate(blocks)
            for handle in (
                block.register_forward_pre_hook(_Before(self, number)),
                block.register_forward_hook(_After(self, number)),
            )
        ]

    @property
    def streamed(self) -> dict[nn.Parameter, StreamedWeight]:
        """The streamed weights, by parameter."""
        return {weight.master.parameter: weight for block in self.weights for weight in block}

    def need(self, number: int, *, then: int) -> None:
        """Wait for a block's weights and start fetching those of block `then`."""
        if self._ahead is not None:
            # From disk, `then` and the one after are read into host buffers; the copy to the device is short.
            then_after = 2 * then - number
            for wanted in (number, then, then_after):
                if 0 <= wanted < len(self.weights):
                    self._ahead.begin(wanted, [one for one in self.weights[wanted] if not one.is_here])
            self._ahead.wait(number)
        self._fetch(number)
        for weight in self.weights[number]:
            if weight.arrived is not None:
                torch.cuda.current_stream(self.device).wait_event(weight.arrived)
        if self._ahead is not None:
            self._ahead.release(number, self.stream)
        elif 0 <= then < len(self.weights):
            self._fetch(then)

    def _fetch(self, number: int) -> None:
        due = [weight for weight in self.weights[number] if not weight.is_here]
        if not due:
            return
        for weight in due:
            weight.allocate()
        if self.stream is None:
            for weight in due:
                weight.fill()
            return
        # The compute stream may still use this memory for what it held before.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for weight in due:
                weight.fill()
                weight.arrived = self.stream.record_event()

    def evict(self, number: int) -> None:
        """Free a block's device memory."""
        for weight in self.weights[number]:
            weight.release()

    def backward_reached(self, number: int) -> None:
        """Prepare a block's backward: fetch its weights, prefetch the previous block's, evict the others."""
        backward = current_backward()
        if backward != self._backward:
            # Also after a failed backward, whose final callback never ran.
            self._backward = backward
            Variable._execution_engine.queue_callback(self.evict_all)
        for other in range(len(self.weights)):
            if other not in (number, number - 1):
                self.evict(other)
        self.need(number, then=number - 1)

    def evict_all(self) -> None:
        """Free the device memory of all blocks."""
        self._backward = None
        if self._ahead is not None:
            self._ahead.forget()
        for number in range(len(self.weights)):
            self.evict(number)

    def release(self) -> None:
        """Remove the hooks and free the device memory."""
        for handle in self._handles:
            handle.remove()
        self.evict_all()


class StreamHome(NamedTuple):
    """Where streamed weights live."""

    device: torch.device
    dtype: torch.dtype | None
    """The compute dtype of matrices; None: as they are."""
    on_disk: set[nn.Parameter]
    store: DiskStore | None


def streamed_parameters(blocks: list[nn.Module]) -> list[list[nn.Parameter]]:
    """Return the parameters of each block that no other block shares."""
    counts: dict[nn.Parameter, int] = {}
    for block in blocks:
        for parameter in block.parameters():
            counts[parameter] = counts.get(parameter, 0) + 1
    return [[one for one in block.parameters() if counts[one] == 1] for block in blocks]


class StreamedWeight:
    """One streamed weight and its source on the host or on disk."""

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
        self.staged: Staged | None = None
        """The weight in a host buffer, where it was read ahead."""
        parameter.data = torch.empty(parameter.shape, dtype=dtype, device=home.device)
        self._bytes = parameter.untyped_storage().nbytes()
        self.arrived: torch.cuda.Event | None = None
        self.release()

    @property
    def is_master(self) -> bool:
        """Whether the source is the master weight itself."""
        return self.source.data_ptr() == self.master.part.data_ptr()

    @property
    def is_here(self) -> bool:
        """Whether the weight has memory on the device."""
        return self.master.parameter.untyped_storage().nbytes() > 0

    def allocate(self) -> None:
        """Allocate device memory."""
        self.master.parameter.untyped_storage().resize_(self._bytes)

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the weight in, without a version change: the graph sees the same values."""
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(self.master.parameter):
            source = self.source if self.staged is None else self.staged.tensor
            self.master.parameter.copy_(source, non_blocking=True)

    def release(self) -> None:
        """Free the device memory, after any copy into it has finished."""
        if self.arrived is not None:
            torch.cuda.current_stream(self.master.device).wait_event(self.arrived)
        self.master.parameter.untyped_storage().resize_(0)
        self.arrived = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over a changed master weight."""
        if not self.is_master:
            if self.store is None:
                self.source.copy_(self.master.part)
            else:
                self.store.write(self.source, self.master.part)
        self.release()
        self.master.sent()


class ReadAhead:
    """Reads the weights of blocks from disk into host buffers, before the device needs them."""

    def __init__(self, store: DiskStore) -> None:
        self._store = store
        self._free: list[Slot] = []
        self._underway: dict[int, tuple[Slot, list[Transfer], list[StreamedWeight]]] = {}

    def begin(self, number: int, weights: list[StreamedWeight]) -> None:
        """Begin to read the weights of a block that lie on disk, unless that is underway."""
        due = [weight for weight in weights if weight.store is not None]
        if number in self._underway or not due:
            return
        slot = self._free.pop() if self._free else None
        needed = sum(whole_pages(weight.source.nbytes) for weight in due)
        if slot is None or slot.buffer.nbytes < needed:
            slot = Slot(needed, pin=self._store.pin)
        slot.clear()
        transfers = []
        for weight in due:
            weight.staged = slot.take(weight, tuple(weight.source.shape), weight.source.dtype)
            region = self._store.region_of(weight.source)
            transfers.append(self._store.begin_read(region, weight.staged.buffer, weight.staged.offset))
        self._underway[number] = slot, transfers, due

    def wait(self, number: int) -> None:
        """Wait until the weights of a block are in their buffers."""
        for transfer in self._underway[number][1] if number in self._underway else ():
            transfer.wait()

    def release(self, number: int, stream: torch.cuda.Stream | None) -> None:
        """Free the buffer of a block whose copy to the device was begun on a stream."""
        if number not in self._underway:
            return
        slot, _, weights = self._underway.pop(number)
        slot.sent = None if stream is None else stream.record_event()
        for weight in weights:
            weight.staged = None
        self._free.append(slot)

    def forget(self) -> None:
        """Drop what was read ahead, which may be old."""
        for number in list(self._underway):
            self.wait(number)
            self.release(number, None)


class _Before:
    def __init__(self, blocks: StreamedBlocks, number: int) -> None:
        self.blocks, self.number = blocks, number

    def __call__(self, _module: nn.Module, _args: Any) -> None:
        self.blocks.need(self.number, then=self.number + 1)


class _After:
    def __init__(self, blocks: StreamedBlocks, number: int) -> None:
        self.blocks, self.number = blocks, number

    def __call__(self, _module: nn.Module, _args: Any, out: Any) -> None:
        given = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if given and torch.is_grad_enabled():
            torch.autograd.graph.register_multi_grad_hook(given, self._reached(), mode="any")
        self.blocks.evict(self.number)

    def _reached(self) -> Callable[[Tensor], None]:
        return lambda _gradient: self.blocks.backward_reached(self.number)
