"""The files of folders and archives as streams, opened safely, nothing unpacked to disk.

Symbolic links, devices, pipes and sockets are never opened. Archive members with absolute or climbing names, links,
encrypted members and compression bombs are rejected with a reason; the rest of the archive is read. Archives inside
archives are opened to a fixed depth.
"""

from __future__ import annotations

import bz2
import io
import lzma
import os
import shutil
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO, cast

import zstandard

from piledriver.core.errors import MissingFileError, StorageError, UsageError
from piledriver.corpus.document import Refusal
from piledriver.corpus.raw.gzip import GzipReader
from piledriver.corpus.raw.limits import CompressionBombError, Expansion, damage_refusal, is_bomb
from piledriver.corpus.raw.partial_reads import DAMAGE, PartialRaw, PartialReader

MAX_DEPTH = 4
MAX_MEMBERS = 50_000_000
_COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")

Wants = Callable[[str], bool]
OnBytes = Callable[[int], None]
OnSkipped = Callable[[str], None]


@dataclass
class RawStream:
    """One raw file or archive member. `file` is its decompressed content, to be read before the next stream.

    `path` is set for a plain local file: its pieces may be ranges of that file, which workers open themselves.
    """

    origin: str
    name: str
    path: str | None = None
    content: BinaryIO | None = None

    @cached_property
    def file(self) -> BinaryIO:
        """The content, with one layer of compression removed."""
        return decompressed(self.raw, self.origin)

    @cached_property
    def raw(self) -> BinaryIO:
        """The content as stored."""
        if self.content is not None:
            return self.content
        assert self.path is not None, "a stream has either a path or content"
        return open(self.path, "rb")

    def bytes_read(self) -> int:
        """Return how many bytes were read, after decompression."""
        opened = (self.__dict__[name] for name in ("file", "raw") if name in self.__dict__)
        return max((file.tell() for file in opened if not file.closed), default=0)

    def close(self) -> None:
        """Close the files that were opened."""
        for name in ("file", "raw"):
            if name in self.__dict__:
                getattr(self, name).close()


def raw_streams(
    paths: Iterable[str], wants: Wants, on_bytes: OnBytes | None = None, on_skipped: OnSkipped | None = None
) -> Iterator[RawStream | Refusal]:
    """Yield every wanted file below the paths and in the archives there, in a fixed order.

    `on_bytes` is called with the size of each file, `on_skipped` with the origin of each file in a folder that is not
    wanted.
    """
    for path, origin, named in local_files(paths):
        size = _size(path)
        if on_bytes is not None:
            on_bytes(size)
        kind = archive_kind(path)
        if kind is not None and not (named and wants(os.path.basename(path))):
            try:
                file = open(path, "rb")
            except OSError as error:
                yield Refusal("unreadable file", origin, str(error))
                continue
            with file:
                yield from _archive(file, kind, origin, wants, Expansion(size))
        elif named or wants(os.path.basename(path)):
            # A file that the user names is read whatever its name; in a folder the name decides.
            stream = RawStream(origin, os.path.basename(path), path)
            yield stream
            stream.close()
        elif on_skipped is not None:
            on_skipped(origin)


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        # It has just vanished; opening it will report that.
        return 0


def local_files(paths: Iterable[str]) -> Iterator[tuple[str, str, bool]]:
    """Yield (path, origin, whether the user named it) of every regular file, sorted within folders, without links."""
    for path in paths:
        if not os.path.lexists(path):
            raise MissingFileError(path)
        base = os.path.basename(os.path.abspath(path))
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            yield path, base, True
        elif stat.S_ISDIR(mode):
            if not os.access(path, os.R_OK | os.X_OK):
                raise StorageError(f"cannot read {path}: Permission denied", fix="check the permissions")
            for root, folders, names in os.walk(path):
                folders.sort()
                for name in sorted(names):
                    full = os.path.join(root, name)
                    if stat.S_ISREG(os.lstat(full).st_mode):
                        yield full, os.path.join(base, os.path.relpath(full, path)), False
        else:
            raise UsageError(f"{path} is neither a file nor a folder", fix="give regular files or folders")


def bare_name(name: str) -> str:
    """Return a file name in lower case without the suffix of its compression.

    >>> bare_name("Posts.XML.gz")
    'posts.xml'
    """
    lowered = name.lower()
    for compression in _COMPRESSIONS:
        lowered = lowered.removesuffix(compression)
    return lowered


def archive_kind(name: str) -> str | None:
    """Return the kind of archive by name: 'tar', 'zip', '7z' or `None`."""
    lowered = bare_name(name)
    if lowered.endswith(".tar") or name.lower().endswith((".tgz", ".tbz2", ".txz")):
        return "tar"
    return "zip" if lowered.endswith(".zip") else "7z" if lowered.endswith(".7z") else None


def _archive(
    file: BinaryIO, kind: str, origin: str, wants: Wants, expansion: Expansion, depth: int = 1
) -> Iterator[RawStream | Refusal]:
    members = {"tar": _tar_members, "zip": _zip_members, "7z": _seven_zip_members}[kind]
    seen = 0
    try:
        for member in members(file, origin):
            seen += 1
            if seen > MAX_MEMBERS:
                yield Refusal("too many members", origin, f"more than {MAX_MEMBERS}")
                return
            if isinstance(member, Refusal):
                yield member
                continue
            inner = archive_kind(member.name)
            if wants(member.name):
                yield member
                expansion.add(member.bytes_read())
                member.close()
                if expansion.is_bomb:
                    detail = (
                        f"{expansion.packed} bytes expand to more than {expansion.unpacked} in all members together"
                    )
                    yield Refusal(CompressionBombError.reason, origin, detail)
                    return
            elif inner is not None:
                if depth >= MAX_DEPTH:
                    yield Refusal("archives nested too deeply", member.origin, f"more than {MAX_DEPTH} levels")
                else:
                    yield from _archive(member.raw, inner, member.origin, wants, expansion, depth + 1)
                    if expansion.is_bomb:
                        return
        if not seen:
            yield Refusal("empty archive", origin)
    except DAMAGE as error:
        yield damage_refusal(origin, error, "damaged archive")


def _member(origin: str, name: str, content: BinaryIO) -> RawStream | Refusal:
    if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/"):
        return Refusal("unsafe member name", f"{origin}!{name}")
    return RawStream(f"{origin}!{name}", os.path.basename(name), content=content)


def _tar_members(file: BinaryIO, origin: str) -> Iterator[RawStream | Refusal]:
    # Stream mode: one pass without seeking reads a compressed archive of any size in constant memory.
    content = decompressed(file, origin)
    with tarfile.open(fileobj=content, mode="r|", ignore_zeros=False) as archive:
        for entry in archive:
            if entry.isdir():
                continue
            if not entry.isreg():
                yield Refusal("not a regular file", f"{origin}!{entry.name}")
                continue
            inside = archive.extractfile(entry)
            assert inside is not None
            # In stream mode `seekable` of a member fails: wrap it in a stream where it works.
            yield _member(origin, entry.name, cast(BinaryIO, PartialReader(PartialRaw(inside), 1 << 16)))
    # Read to the end: a wrong checksum after the last member raises.
    while content.read(1 << 20):
        pass


def _zip_members(unseekable: BinaryIO, origin: str) -> Iterator[RawStream | Refusal]:
    with _seekable_copy(unseekable) as file:
        yield from _listed_zip_members(file, origin)


def _listed_zip_members(file: BinaryIO, origin: str) -> Iterator[RawStream | Refusal]:
    try:
        opened = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError) as error:
        yield damage_refusal(origin, error, "damaged archive")
        yield from _recovered_zip_members(file, origin)
        return
    with opened as archive:
        for entry in archive.infolist():
            if not entry.filename or entry.filename.endswith("/"):
                continue
            if entry.flag_bits & 1:
                yield Refusal("encrypted member", f"{origin}!{entry.filename}")
                continue
            if is_bomb(entry.file_size, entry.compress_size):
                yield Refusal(CompressionBombError.reason, f"{origin}!{entry.filename}", f"{entry.file_size} bytes")
                continue
            try:
                content = cast(BinaryIO, archive.open(entry))
            except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
                yield Refusal("damaged member", f"{origin}!{entry.filename}", str(error))
                continue
            yield _member(origin, entry.filename, content)


def _recovered_zip_members(file: BinaryIO, origin: str) -> Iterator[RawStream | Refusal]:
    """Yield the members of a zip archive that has no directory."""
    from piledriver.corpus.raw.zip_recovery import EncryptedMemberError, recovered_members

    last = ""
    try:
        for name, content in recovered_members(file):
            last = name
            yield _member(origin, name, cast(BinaryIO, PartialReader(_Guarded(content, file), 1 << 16)))
    except EncryptedMemberError as error:
        yield Refusal("encrypted member", origin, f"after {last!r}: {error}; the members after it are lost")
    except OSError as error:
        yield Refusal("damaged member", origin, f"at or after {last!r}: {error}; the members after it are lost")


def _seven_zip_members(unseekable: BinaryIO, origin: str) -> Iterator[RawStream | Refusal]:
    from piledriver.corpus.raw.seven_zip import EncryptedError, MemberError, members

    with _seekable_copy(unseekable) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        try:
            for found in members(file, lambda length: is_bomb(length, size)):
                if isinstance(found, MemberError):
                    yield Refusal(found.reason, f"{origin}!{found.name}", str(found))
                else:
                    yield _member(origin, *found)
        except EncryptedError as error:
            yield Refusal("encrypted archive", origin, str(error))


def decompressed(file: BinaryIO, origin: str) -> BinaryIO:
    """Return the stream without one layer of gzip, bzip2, xz or zstd, told by its first bytes; any other unchanged."""
    head, file = _peek(file, 6)
    opened: BinaryIO
    if head[:2] == b"\x1f\x8b":
        opened = cast(BinaryIO, GzipReader(file))
    elif head[:3] == b"BZh":
        opened = cast(BinaryIO, bz2.BZ2File(file))
    elif head == b"\xfd7zXZ\x00":
        opened = cast(BinaryIO, lzma.LZMAFile(file))
    elif head[:4] == b"\x28\xb5\x2f\xfd":
        opened = cast(
            BinaryIO, zstandard.ZstdDecompressor(max_window_size=1 << 31).stream_reader(file, read_across_frames=True)
        )
    else:
        return file
    return cast(BinaryIO, PartialReader(_Decompressed(opened, file), 1 << 18))


class _Guarded(PartialRaw):
    """A decompressed stream that raises when it has expanded more than text can."""

    def __init__(self, inner: BinaryIO, outer: BinaryIO) -> None:
        super().__init__(inner)
        self._outer = outer

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        count = super().readinto(buffer)
        if is_bomb(self._given, packed := self._outer.tell()):
            raise CompressionBombError(f"{packed} bytes expand to more than {self._given}")
        return count

    def close(self) -> None:
        self._inner.close()
        super().close()


class _Decompressed(_Guarded):
    """A guarded stream that closes the compressed one."""

    def close(self) -> None:
        super().close()
        self._outer.close()


class FileRange(io.BufferedIOBase):
    """A range of a local file as a stream."""

    def __init__(self, path: str, offset: int = 0, length: int | None = None) -> None:
        self._file = open(path, "rb")
        self._file.seek(offset)
        self._offset = offset
        self._end = offset + length if length is not None else os.path.getsize(path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._end - self._file.tell())
        return self._file.read(left if size is None or size < 0 else min(size, left))

    read1 = read

    def readline(self, size: int | None = -1) -> bytes:
        # The inherited one reads byte by byte.
        left = max(0, self._end - self._file.tell())
        return self._file.readline(left if size is None or size < 0 else min(size, left))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: self._offset, io.SEEK_CUR: self._file.tell(), io.SEEK_END: self._end}[whence]
        return self._file.seek(max(self._offset, base + offset)) - self._offset

    def tell(self) -> int:
        return self._file.tell() - self._offset

    def close(self) -> None:
        self._file.close()
        super().close()


def _seekable(file: BinaryIO) -> bool:
    try:
        return file.seekable()
    except AttributeError:
        # Members of a tar archive in stream mode (Python 3.11) lack the method.
        return False


@contextmanager
def _seekable_copy(file: BinaryIO) -> Iterator[BinaryIO]:
    """Give the file itself where it can seek, else a temporary copy: zip and 7z have their directory at the end."""
    if _seekable(file):
        yield file
        return
    with tempfile.TemporaryFile() as spooled:
        # The readable part of a damaged archive may still hold members.
        with suppress(*DAMAGE):
            shutil.copyfileobj(file, spooled, 1 << 20)
        spooled.seek(0)
        yield cast(BinaryIO, spooled)


def _peek(file: BinaryIO, size: int) -> tuple[bytes, BinaryIO]:
    if _seekable(file):
        at = file.tell()
        head = file.read(size)
        file.seek(at)
        return head, file
    buffered = file if isinstance(file, io.BufferedReader) else PartialReader(PartialRaw(file), 1 << 18)
    return buffered.peek(size)[:size], cast(BinaryIO, buffered)
