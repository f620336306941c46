"""Coalesced reads: tensors that are neighbours in a file come to host memory by one read, in place.

Whole pages of the file are read into pages of new memory, in which the tensors lie as in the file. No byte is copied,
and small tensors cost no read of their own. Tensors of one run share a mapping, which is freed with the last of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from piledriver.engine.offload.disk.direct_io import Transfer
from piledriver.engine.offload.disk.extents import Extent
from piledriver.engine.offload.disk.host_buffer import PAGE_BYTES, memory_of, whole_pages
from piledriver.engine.offload.disk.reader import DirectReader
from piledriver.engine.offload.pinned import page_aligned_empty

RUN_BYTES = 64 << 20
"""Of a run, where it has more than one large tensor: what stays while any tensor of it is in use."""
_WIDEST_GAP = 1 << 20
"""Between neighbours: more bytes that nothing asked for cost longer than another read."""
_OWN_MEMORY = 64 << 10
"""Smaller tensors are copied out of the run: kernels may choose, and round, by alignment."""

K = TypeVar("K")


@dataclass
class _Run(Generic[K]):
    """Neighbours in a file that are read at once."""

    start: int
    """In the file, of the first page."""
    stop: int
    """In the file, of the last tensor."""
    members: list[tuple[K, Extent]]

    def takes(self, extent: Extent, run_bytes: int) -> bool:
        before = self.members[-1][1]
        near = (before.path, before.file) == (extent.path, extent.file) and extent.offset - self.stop <= _WIDEST_GAP
        return near and (extent.offset + extent.nbytes - self.start <= run_bytes or extent.nbytes < _OWN_MEMORY)


def read_coalesced(
    reader: DirectReader, wanted: Mapping[K, Extent], *, run_bytes: int = RUN_BYTES, ahead: int | None = None
) -> Iterator[tuple[K, Tensor]]:
    """Yield the tensors of extents in host memory, by key, in the order of the files.

    All reads begin at once, or `ahead` runs before the one whose tensors are yielded: for tensors that are not kept.
    """
    runs = deque(_runs(wanted, run_bytes))
    underway: deque[tuple[_Run[K], Tensor, Transfer]] = deque()
    while runs or underway:
        while runs and (ahead is None or len(underway) <= ahead):
            underway.append(_begin(reader, runs.popleft()))
        run, memory, reading = underway.popleft()
        reading.wait()
        for key, extent in run.members:
            yield key, _tensor(memory, extent, run.start)
        del memory


def _runs(wanted: Mapping[K, Extent], run_bytes: int) -> list[_Run[K]]:
    runs: list[_Run[K]] = []
    for key, extent in sorted(wanted.items(), key=lambda one: (one[1].path, id(one[1].file), one[1].offset)):
        if not runs or not runs[-1].takes(extent, run_bytes):
            runs.append(_Run(extent.offset & ~(PAGE_BYTES - 1), extent.offset, []))
        runs[-1].members.append((key, extent))
        runs[-1].stop = max(runs[-1].stop, extent.offset + extent.nbytes)
    return runs


def _begin(reader: DirectReader, run: _Run[K]) -> tuple[_Run[K], Tensor, Transfer]:
    needed = run.stop - run.start
    memory = page_aligned_empty(torch.Size((max(whole_pages(needed), PAGE_BYTES),)), torch.uint8)
    return run, memory, reader.read_pages(run.members[0][1], run.start, memory_of(memory), needed)


def _tensor(memory: Tensor, extent: Extent, start: int) -> Tensor:
    at = extent.offset - start
    if extent.nbytes >= _OWN_MEMORY and at % extent.dtype.itemsize == 0:
        # A storage of its own: what is saved of a tensor is what its storage holds.
        view = torch.frombuffer(memory_of(memory), dtype=extent.dtype, count=extent.count, offset=at)
        return view.view(extent.shape)
    own = torch.empty(extent.shape, dtype=extent.dtype)
    own.view(-1).view(torch.uint8).copy_(memory[at : at + extent.nbytes])
    return own
