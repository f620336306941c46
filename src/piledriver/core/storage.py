"""Read and write files, local or behind a URL, atomically.

A path without a scheme is a local file; one with a scheme (`s3://`, `gs://`, `memory://`, ...) goes through fsspec. A
reader sees the old file or the complete new one: local files are written, synced, renamed and their folder synced;
remote ones are uploaded under another name, then moved.
"""

from __future__ import annotations

import errno
import hashlib
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
    """Return whether a location is a URL for fsspec rather than a local path."""
    return "://" in os.fspath(location)


def join(folder: Location, *names: str) -> str:
    """Return `folder/name/...` for a path or a URL."""
    base = os.fspath(folder)
    return "/".join([base.rstrip("/"), *names]) if is_remote(base) else os.path.join(base, *names)


def open_read(location: Location) -> BinaryIO:
    """Open a file for reading bytes; raise a `StorageError` that names a missing or unreadable one."""
    with _named(location, "read"):
        if is_remote(location):
            filesystem, path = _remote(location)
            return cast(BinaryIO, filesystem.open(path, "rb"))
        return open(location, "rb")


@contextmanager
def atomic_write(location: Location) -> Iterator[BinaryIO]:
    """Open a file for writing bytes; it appears under its name only if the block ends without an exception.

    >>> with atomic_write("memory://example.txt") as file:
    ...     _ = file.write(b"all or nothing")
    >>> read_bytes("memory://example.txt")
    b'all or nothing'
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
            # Programs write JSON as UTF-8: another encoding is damage.
            raise CorruptFileError(
                f"{name} is damaged: byte {error.start} is not UTF-8",
                fix="restore it from a copy, or run the command that wrote it again",
            ) from error
        raise StorageError(f"{name} is not UTF-8 text (byte {error.start})", fix="save it as UTF-8") from error


def exists(location: Location) -> bool:
    """Return whether a file or folder exists; raise `StorageError` if permissions hide it."""
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
    """Return the bytes in a file."""
    with _named(location, "read"):
        if is_remote(location):
            filesystem, path = _remote(location)
            return int(filesystem.size(path))
        return os.path.getsize(location)


def files_below(folder: Location) -> list[str]:
    """Return every file below a folder, sorted, without the remains of interrupted writes."""
    if is_remote(folder):
        filesystem, path = _remote(folder)
        found = [filesystem.unstrip_protocol(name) for name in filesystem.find(path)]
    else:
        walked = os.walk(folder, onerror=_raise_unless_missing)
        found = [os.path.join(root, name) for root, _, names in walked for name in names]
    return sorted(name for name in found if not name.endswith(_PARTIAL))


def _raise_unless_missing(error: OSError) -> None:
    """Raise for a folder that cannot be read; a missing folder is empty."""
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        with _named(error.filename, "read"):
            raise error


def make_folder(folder: Location) -> None:
    """Create a local folder and its parents, if needed."""
    with _named(folder, "write"):
        os.makedirs(folder, exist_ok=True)


def require_writable(folder: Location) -> None:
    """Raise `StorageError` if a local folder, which may not exist yet, cannot be written; call it before long work."""
    place = os.path.abspath(os.fspath(folder))
    if is_remote(folder):
        return
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    code = 0 if os.access(place, os.W_OK | os.X_OK) else errno.EACCES
    code = code if os.path.isdir(place) else errno.ENOTDIR
    if code:
        raise explained(OSError(code, os.strerror(code)), folder, "write")


def remove_file(location: Location) -> None:
    """Remove a file, if it exists."""
    with _named(location, "remove"):
        if is_remote(location):
            filesystem, path = _remote(location)
            if filesystem.exists(path):
                filesystem.rm(path)
        else:
            Path(location).unlink(missing_ok=True)


def sha256(location: Location) -> str:
    """Return the checksum of a file, as `sha256sum` prints it, in constant memory."""
    digest = hashlib.sha256()
    with open_read(location) as file, _named(location, "read"):
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def fsync_folder(folder: Location) -> None:
    """Sync a local folder, so that a rename in it is durable."""
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
    # Uploaded under another name, then moved: not every remote file system writes atomically.
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
    """Return an `OSError` as a `StorageError` with the file, the reason and, if known, the fix."""
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
    """Re-raise `OSError` as `StorageError` with the name of the file and the fix."""
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
