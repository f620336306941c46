"""Files, local or behind a URL, through one small interface.

A path without a scheme is a local file; anything with one (`s3://`, `gs://`, `memory://`, ...) goes through fsspec.
Every write is atomic: readers see the old file or the whole new one. Locally that is write, fsync, rename, fsync of the
folder; remotely, upload under another name, then move.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from piledriver.core.errors import CorruptFileError, MissingFileError, StorageError

Location = str | os.PathLike[str]

_PARTIAL = ".partial"
_BLOCK_BYTES = 1 << 20


def is_remote(location: Location) -> bool:
    """Whether a location is a URL for fsspec rather than a local path."""
    return "://" in os.fspath(location)


def join(folder: Location, *names: str) -> str:
    """`folder/name/...` for both kinds of location."""
    base = os.fspath(folder)
    return "/".join([base.rstrip("/"), *names]) if is_remote(base) else os.path.join(base, *names)


def open_read(location: Location) -> BinaryIO:
    """Open for reading bytes. A missing or unreadable file is a `StorageError` that names it."""
    with _named(location, "read"):
        if is_remote(location):
            filesystem, path = _remote(location)
            return cast(BinaryIO, filesystem.open(path, "rb"))
        return open(location, "rb")


def open_text(location: Location) -> IO[str]:
    """Open UTF-8 text for reading, line by line."""
    return io.TextIOWrapper(open_read(location), encoding="utf-8")


@contextmanager
def atomic_write(location: Location) -> Iterator[BinaryIO]:
    """Open for writing bytes; the file appears under its name only when the block ends without an exception.

    >>> with atomic_write("memory://example.txt") as file:
    ...     _ = file.write(b"whole or not at all")
    >>> read_bytes("memory://example.txt")
    b'whole or not at all'
    """
    with _named(location, "write"):
        if is_remote(location):
            with tempfile.TemporaryFile() as buffer:
                yield cast(BinaryIO, buffer)
                buffer.seek(0)
                _upload(buffer, location)
            return
        target = Path(location)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.parent / f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}{_PARTIAL}"
        try:
            with open(partial, "wb") as local:
                yield local
                local.flush()
                os.fsync(local.fileno())
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        fsync_folder(target.parent)


def write_bytes(location: Location, content: bytes) -> None:
    """Write a whole file atomically."""
    with atomic_write(location) as file:
        file.write(content)


def write_text(location: Location, content: str) -> None:
    """Write a whole UTF-8 file atomically."""
    write_bytes(location, content.encode("utf-8"))


def read_bytes(location: Location) -> bytes:
    """Read a whole file."""
    with open_read(location) as file, _named(location, "read"):
        return file.read()


def read_text(location: Location) -> str:
    """Read a whole UTF-8 file."""
    try:
        return read_bytes(location).decode("utf-8")
    except UnicodeDecodeError as error:
        name = os.fspath(location)
        if name.endswith(".json"):
            # JSON is UTF-8 whoever writes it, and programs do: nobody saved it in another encoding.
            raise CorruptFileError(
                f"{name} is damaged: byte {error.start} is no text",
                fix="restore it from a copy, or run the command that wrote it again",
            ) from error
        raise StorageError(f"{name} is not UTF-8 text (byte {error.start})", fix="save it as UTF-8") from error


def exists(location: Location) -> bool:
    """Whether there is a file or folder. Where that may not be known (a folder that is not ours), it is an error."""
    if is_remote(location):
        filesystem, path = _remote(location)
        return bool(filesystem.exists(path))
    with _named(location, "read"):
        try:
            os.stat(location)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def require(location: Location) -> None:
    """Raise `MissingFileError` unless there is a file or folder of that name."""
    if not exists(location):
        raise MissingFileError(os.fspath(location))


def size(location: Location) -> int:
    """Bytes in a file."""
    with _named(location, "read"):
        if is_remote(location):
            filesystem, path = _remote(location)
            return int(filesystem.size(path))
        return os.path.getsize(location)


def files_below(folder: Location) -> list[str]:
    """Every file below a folder, sorted, without the leftovers of writes that a crash interrupted."""
    if is_remote(folder):
        filesystem, path = _remote(folder)
        found = [filesystem.unstrip_protocol(name) for name in filesystem.find(path)]
    else:
        walked = os.walk(folder, onerror=_not_silently)
        found = [os.path.join(root, name) for root, _, names in walked for name in names]
    return sorted(name for name in found if not name.endswith(_PARTIAL))


def _not_silently(error: OSError) -> None:
    """A folder that may not be read is not an empty one; one that is not there is."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        with _named(error.filename, "read"):
            raise error


def make_folder(folder: Location) -> None:
    """Make a local folder, and those above it, where it is not there yet."""
    with _named(folder, "write"):
        os.makedirs(folder, exist_ok=True)


def remove(location: Location) -> None:
    """Remove a file; one that is not there is fine."""
    with _named(location, "remove"):
        if is_remote(location):
            filesystem, path = _remote(location)
            if filesystem.exists(path):
                filesystem.rm(path)
        else:
            Path(location).unlink(missing_ok=True)


def sha256(location: Location) -> str:
    """The checksum of a file, as `sha256sum` prints it, in constant memory."""
    digest = hashlib.sha256()
    with open_read(location) as file, _named(location, "read"):
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def fsync_folder(folder: Location) -> None:
    """Make a rename in a local folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remote(location: Location) -> tuple[Any, str]:
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(os.fspath(location))
    return filesystem, path


def _upload(content: IO[bytes], location: Location) -> None:
    # To a name of its own, then moved: not every file system behind a URL puts whole files, and none moves half of one.
    filesystem, path = _remote(location)
    partial = f"{path}.{secrets.token_hex(4)}{_PARTIAL}"
    filesystem.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
    try:
        with filesystem.open(partial, "wb") as file:
            shutil.copyfileobj(content, file, _BLOCK_BYTES)
        filesystem.mv(partial, path)
    except BaseException:
        if filesystem.exists(partial):
            filesystem.rm(partial)
        raise


_FIXES = {
    errno.ENOENT: "check the path",
    errno.EACCES: "check the permissions",
    errno.EPERM: "check the permissions",
    errno.EISDIR: "give a file, not a folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EEXIST: "a part of the path is a file, not a folder",
    errno.ENOSPC: "free some disk space and run it again",
    errno.EFBIG: "raise the file size limit (ulimit -f) and run it again",
    errno.ENAMETOOLONG: "give a shorter path",
    errno.ELOOP: "a link on the path leads back to itself",
    errno.EROFS: "choose a folder that can be written",
}


def explained(error: OSError, location: Location | None = None, verb: str = "use") -> StorageError:
    """The operating system's error as ours: the file, the reason, and what to do where that is known."""
    reason = error.strerror or str(error) or type(error).__name__
    name = error.filename if location is None else os.fspath(location)
    if isinstance(error, FileNotFoundError) and verb in ("read", "use") and isinstance(name, str | bytes):
        return MissingFileError(os.fsdecode(name))
    return StorageError(
        f"cannot {verb} {os.fsdecode(name)}: {reason}" if name is not None and not isinstance(name, int) else reason,
        fix=_FIXES.get(error.errno or 0),
    )


@contextmanager
def _named(location: Location, verb: str) -> Iterator[None]:
    """Turn the operating system's errors into ours, with the file's name and what to do."""
    try:
        yield
    except OSError as error:
        raise explained(error, location, verb) from error
    except (ImportError, ValueError) as error:
        if not is_remote(location):
            raise
        raise StorageError(
            f"cannot {verb} {os.fspath(location)}: {error}", fix="install the fsspec package for that scheme"
        ) from error
