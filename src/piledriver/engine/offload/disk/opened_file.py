"""Files opened past the page cache (O_DIRECT), and the system calls that transfer their bytes.

Where the filesystem rejects O_DIRECT (tmpfs, some overlays) the same calls go through the page cache. So do reads of
parts of a named file that are in it already.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from dataclasses import dataclass

import torch

from piledriver.engine.offload.disk.errors import DiskError, disk_error
from piledriver.engine.offload.disk.host_buffer import PAGE_BYTES, memory_of
from piledriver.engine.offload.disk.page_cache import is_cached
from piledriver.engine.offload.pinned import page_aligned_empty


@dataclass(eq=False)
class OpenedFile:
    """A file that is read or written: its descriptor, whether it bypasses the page cache, what errors call it.

    It owns its descriptors. A transfer that is queued holds the file, which so stays open until it is done.
    """

    descriptor: int
    is_direct: bool
    name: str
    """The path of a file, or the folder of one that has no name."""
    drops_cache: bool = False
    """Whether the page cache drops what was transferred, where the file cannot bypass it."""
    buffered: int | None = None
    """A descriptor that does not bypass the page cache, for reads of what is in it."""

    def __post_init__(self) -> None:
        self._finalizer = weakref.finalize(self, _close, self.descriptor, self.buffered)

    def read(self, offset: int, into: memoryview, needed: int | None = None) -> None:
        """Read at an offset; a file may end after `needed` bytes (default: all), within the last page."""
        self._move(offset, into, len(into) if needed is None else needed, is_write=False)

    def write(self, offset: int, source: memoryview) -> None:
        """Write at an offset."""
        self._move(offset, source, len(source), is_write=True)

    def _move(self, offset: int, memory: memoryview, needed: int, *, is_write: bool) -> None:
        call, doing = (os.pwritev, "writing") if is_write else (os.preadv, "reading")
        descriptor, is_direct = self.descriptor, self.is_direct
        if self.buffered is not None and not is_write and is_cached(self.buffered, offset, needed):
            descriptor, is_direct = self.buffered, False
        reached = 0
        while reached < needed:
            # A direct transfer starts at a page.
            start = reached & ~(PAGE_BYTES - 1) if is_direct else reached
            try:
                moved = call(descriptor, [memory[start:]], offset + start)
            except OSError as error:
                raise disk_error(error, f"{doing} {len(memory):,} bytes at {offset + start:,}", self.name) from error
            if start + moved <= reached:
                raise DiskError(
                    f"{self.name} ends at {offset + reached:,}, {needed - reached:,} bytes too early",
                    fix="the file was truncated: download or save it again",
                )
            reached = start + moved
        if self.drops_cache and not self.is_direct:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the descriptors."""
        self._finalizer()


def open_direct(
    path: str, flags: int, *, name: str, drops_cache: bool = False, reads_cached: bool = False
) -> OpenedFile:
    """Open an existing file with O_DIRECT, or through the page cache where the filesystem rejects it.

    With `reads_cached`, parts of it that are in the page cache are read from there.
    """
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, flags | direct | os.O_CLOEXEC)
            if _accepts(descriptor):
                buffered = os.open(path, flags | os.O_CLOEXEC) if reads_cached else None
                return OpenedFile(descriptor, True, name, drops_cache, buffered)
            os.close(descriptor)
    return OpenedFile(os.open(path, flags | os.O_CLOEXEC), False, name, drops_cache)


def _close(descriptor: int, buffered: int | None) -> None:
    os.close(descriptor)
    if buffered is not None:
        os.close(buffered)


def _accepts(descriptor: int) -> bool:
    """Whether a descriptor reads with the alignment of a page: some filesystems only reject the first transfer."""
    try:
        os.preadv(descriptor, [memory_of(page_aligned_empty(torch.Size((PAGE_BYTES,)), torch.uint8))], 0)
    except OSError:
        return False
    return True
