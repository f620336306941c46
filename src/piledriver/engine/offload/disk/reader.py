"""`DirectReader`: read tensors from named files, or from the files of a disk tier, by direct I/O.

Direct reads bypass the page cache, so weights that are read once for every forward do not fill it; what it holds
already is copied from there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from piledriver.core.errors import StorageError
from piledriver.engine.offload.disk.block_file import Region
from piledriver.engine.offload.disk.direct_io import DirectIO, Transfer
from piledriver.engine.offload.disk.extents import Extent
from piledriver.engine.offload.disk.opened_file import OpenedFile, open_direct


class DirectReader:
    """Reads extents of files into tensors, and keeps the files open.

    >>> import tempfile
    >>> target = torch.empty(3)
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write(b"head" + torch.arange(3.0).numpy().tobytes()), file.flush()
    ...     with DirectReader() as reader:
    ...         reader.read([(Extent(file.name, 4, torch.float32, (3,)), target)]).wait()
    >>> target
    tensor([0., 1., 2.])
    """

    def __init__(self, io: DirectIO | None = None, *, reads_cached: bool = True) -> None:
        """Read with the threads of `io`, by default new ones, which end with the reader.

        With `reads_cached`, what is in the page cache is read from there; without, from the disk.
        """
        self.io, self._owns_io = DirectIO() if io is None else io, io is None
        self._reads_cached = reads_cached
        self._files: dict[str, OpenedFile] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> DirectReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish the reads and close the files."""
        if self._owns_io:
            self.io.close()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def read(self, jobs: Sequence[tuple[Extent | Region, Tensor]], stream: torch.cuda.Stream | None = None) -> Transfer:
        """Begin to read into contiguous tensors of as many bytes on one device; see `DirectIO.read_tensors`."""
        found = []
        for place, target in jobs:
            if target.nbytes != place.nbytes:
                name = place.path if isinstance(place, Extent) else place.file.folder
                raise StorageError(
                    f"{name}: a tensor of {place.nbytes} bytes at {place.offset} was expected to have {target.nbytes}",
                    fix="load the checkpoint of this model, in the dtype that it was saved in",
                )
            found.append((self._opened(place), place.offset, target))
        return self.io.read_tensors(found, stream)

    def read_pages(self, place: Extent, offset: int, into: memoryview, needed: int) -> Transfer:
        """Begin to read whole pages of the file of an extent, from `offset`, into page-aligned memory.

        The file may end after `needed` bytes, within the last page.
        """
        return self.io.read(self._opened(place), offset, into, needed)

    def _opened(self, place: Extent | Region) -> OpenedFile:
        if place.file is not None:
            return place.file.opened
        with self._lock:
            if place.path not in self._files:
                self._files[place.path] = _open(place.path, self._reads_cached)
            return self._files[place.path]


def _open(path: str, reads_cached: bool) -> OpenedFile:
    try:
        return open_direct(path, os.O_RDONLY, name=path, reads_cached=reads_cached)
    except OSError as error:
        raise StorageError(
            f"cannot open {path}: {error.strerror}", fix="check that the folder of the weights is still there"
        ) from error
