"""`DirectReader`: read tensors from named files, or from the files of a disk tier, by direct I/O.

Direct reads bypass the page cache, so weights that are read once for every forward do not fill it.
"""

from __future__ import annotations

import os
import threading
import weakref
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

    def __init__(self, io: DirectIO | None = None) -> None:
        """Read with the threads of `io`, by default new ones, which end with the reader."""
        self.io = DirectIO() if io is None else io
        self._files: dict[str, OpenedFile] = {}
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _close, self.io if io is None else None, self._files)

    def __enter__(self) -> DirectReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish the reads and close the files."""
        self._finalizer()

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
            file = self._opened(place.path) if place.file is None else place.file.opened
            found.append((file, place.offset, target))
        return self.io.read_tensors(found, stream)

    def _opened(self, path: str) -> OpenedFile:
        with self._lock:
            if path not in self._files:
                self._files[path] = _open(path)
            return self._files[path]


def _open(path: str) -> OpenedFile:
    try:
        return open_direct(path, os.O_RDONLY, name=path)
    except OSError as error:
        raise StorageError(
            f"cannot open {path}: {error.strerror}", fix="check that the folder of the weights is still there"
        ) from error


def _close(io: DirectIO | None, files: dict[str, OpenedFile]) -> None:
    if io is not None:
        io.close()
    for file in files.values():
        os.close(file.descriptor)
    files.clear()
