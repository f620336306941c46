"""Tensors in files: page-aligned regions of preallocated files, mapped into memory and transferred past the page cache.

A region is a tensor over the shared mapping of its file, so a state dict, a checkpoint or a user reads and writes it as
any other tensor, page by page; the optimizer step moves whole regions by direct I/O instead. The kernel keeps both
views coherent; `settle` also writes out and drops the pages that the mapping has touched.

A file is unlinked as soon as it is open: it has no name under which another process could read it, and its space is
freed when the process ends in any way, SIGKILL included.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from piledriver.engine.offload.disk.direct_io import DirectIO, DiskRate, Transfer
from piledriver.engine.offload.disk.errors import DiskError, DiskFullError, disk_error
from piledriver.engine.offload.disk.host_buffer import HostBuffer, whole_pages
from piledriver.engine.offload.disk.opened_file import OpenedFile, open_direct

_STAGING_BYTES = 64 << 20


class BlockFile:
    """One preallocated file without a name."""

    def __init__(self, folder: str, nbytes: int) -> None:
        self.folder, self.nbytes, self.used = folder, whole_pages(max(nbytes, 1)), 0
        descriptor = _unlinked(folder, self.nbytes)
        try:
            # A second description of the same file, which alone has O_DIRECT: the mapping needs one without.
            self.opened: OpenedFile = open_direct(
                f"/proc/self/fd/{descriptor}", os.O_RDWR, name=folder, drops_cache=True
            )
            self.mapping = mmap.mmap(descriptor, self.nbytes, mmap.MAP_SHARED)
        finally:
            os.close(descriptor)
        self._whole = torch.frombuffer(self.mapping, dtype=torch.uint8)
        self.address = self._whole.data_ptr()

    def tensor(self, offset: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return the tensor at an offset, over the mapping."""
        return self._whole[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def settle(self) -> None:
        """Write out the pages that were changed through the mapping, and drop them from memory."""
        try:
            self.mapping.flush()
        except OSError as error:
            raise disk_error(error, "writing changed pages", self.folder) from error
        with suppress(OSError):
            self.mapping.madvise(mmap.MADV_DONTNEED)
            os.posix_fadvise(self.opened.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True)
class Region:
    """Where a tensor lies: its file, and the offset and bytes in it."""

    file: BlockFile
    offset: int
    nbytes: int

    def slice(self, start: int, nbytes: int) -> Region:
        """Return a part, which starts at a multiple of a page."""
        return Region(self.file, self.offset + start, nbytes)


class DiskStore:
    """Allocates tensors in files of one folder, and transfers them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = DiskStore(folder)
    ...     kept = store.put(torch.arange(3.0))
    ...     kept, os.listdir(folder)
    (tensor([0., 1., 2.]), [])
    """

    def __init__(self, folder: str | os.PathLike[str], *, pin: bool = True) -> None:
        self.folder, self.pin = os.fspath(folder), pin
        self.io = DirectIO()
        self.files: list[BlockFile] = []
        self._staging: HostBuffer | None = None
        self._lock = threading.Lock()
        self.expected: DiskRate | None = None
        """The raw rate of the folder, where it was measured."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    def reserve(self, nbytes: int) -> None:
        """Preallocate what files lack of so many free bytes: a full disk is found now, not in the middle of a step."""
        lacking = nbytes - sum(file.nbytes - file.used for file in self.files)
        if lacking > 0:
            self._add_file(lacking)

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in a file."""
        size = whole_pages(max(shape.numel() * dtype.itemsize, 1))
        file = next((one for one in self.files if one.used + size <= one.nbytes), None)
        if file is None:
            file = self._add_file(size)
        offset, file.used = file.used, file.used + size
        return file.tensor(offset, shape, dtype)

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in a file, written past the page cache."""
        kept = self.empty(tensor.shape, tensor.dtype)
        self.write(kept, tensor)
        return kept

    def write(self, kept: Tensor, tensor: Tensor) -> None:
        """Write the values of a tensor, from any device, to a kept tensor of the same size. Waits."""
        region, flat, size = self.region_of(kept), tensor.detach().reshape(-1), kept.element_size()
        with self._lock:
            if self._staging is None or self._staging.nbytes < min(kept.nbytes, _STAGING_BYTES):
                self._staging = HostBuffer(min(kept.nbytes, _STAGING_BYTES), pin=self.pin)
            step = self._staging.nbytes // size
            for start in range(0, flat.numel(), step):
                part = flat[start : start + step]
                self._staging.tensor(0, (part.numel(),), kept.dtype).copy_(part)
                self.begin_write(region.slice(start * size, part.numel() * size), self._staging, 0).wait()

    def region_of(self, tensor: Tensor) -> Region:
        """Return where a kept tensor lies; raise for others."""
        if (found := self.find(tensor)) is None:
            raise DiskError("the tensor is not in a file of this store", fix="keep it with `put` first")
        return found

    def find(self, tensor: Tensor) -> Region | None:
        """Return where a kept tensor lies, None for a tensor in memory."""
        address = tensor.data_ptr() if tensor.device.type == "cpu" else 0
        for file in self.files:
            if file.address <= address < file.address + file.nbytes:
                return Region(file, address - file.address, tensor.nbytes)
        return None

    def begin_read(self, region: Region, buffer: HostBuffer, at: int) -> Transfer:
        """Begin to read a region into a buffer at an offset."""
        size = whole_pages(region.nbytes)
        return self.io.read(region.file.opened, region.offset, buffer.view[at : at + size])

    def begin_write(self, region: Region, buffer: HostBuffer, at: int) -> Transfer:
        """Begin to write a region from a buffer at an offset."""
        size = whole_pages(region.nbytes)
        return self.io.write(region.file.opened, region.offset, buffer.view[at : at + size])

    def settle(self) -> None:
        """Write out and drop the pages that were touched through the mappings."""
        for file in self.files:
            file.settle()

    def _add_file(self, nbytes: int) -> BlockFile:
        self.files.append(BlockFile(self.folder, nbytes))
        return self.files[-1]


def _unlinked(folder: str, nbytes: int) -> int:
    """Return the descriptor of a new file of a size, without a name."""
    try:
        descriptor, path = tempfile.mkstemp(prefix=".piledriver-", suffix=".tier", dir=folder)
    except OSError as error:
        said = os.strerror(error.errno) if error.errno else str(error)
        raise DiskError(f"{folder}: cannot make a file: {said}", fix="name an existing, writable folder") from error
    try:
        os.unlink(path)
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        there = os.statvfs(folder)
        os.close(descriptor)
        made = disk_error(error, f"reserving {nbytes:,} bytes", folder)
        if isinstance(made, DiskFullError):
            free = there.f_bavail * there.f_frsize
            raise DiskFullError(
                f"{folder}: {nbytes:,} bytes are needed, {free:,} are free ({os.strerror(error.errno or 0)})",
                fix="free space there, use another folder, or lower the share on disk",
            ) from error
        raise made from error
    return descriptor
