"""A repository and its files; reads a file from memory, from git's storage or from disk."""

from __future__ import annotations

import os
import stat
from functools import lru_cache

import msgspec

from piledriver.corpus.raw.git.pack import DamagedError
from piledriver.corpus.raw.git.repository import BLOB, Repository
from piledriver.corpus.sources.shared.repositories.rules import MAX_BYTES

BATCH_FILES = 64
BATCH_BYTES = 1 << 20
# The usual length of a file of code, for files that were not opened yet.
FILE_BYTES = 5000


class RepositoryTree(msgspec.Struct, frozen=True):
    """A repository: name, licence, commit, the folder of its objects where it is bare, and its root on disk."""

    name: str
    licence: str | None = None
    commit: str | None = None
    objects: str | None = None
    root: str = ""


class File(msgspec.Struct, frozen=True):
    """One file of a tree: its origin, its path in the tree, and its content, its path on disk or its object id."""

    origin: str
    path: str
    content: bytes | None = None
    on_disk: str | None = None
    object_id: str | None = None


def content_of(file: File, tree: RepositoryTree) -> bytes:
    """Return the bytes of a file."""
    if file.content is not None:
        return file.content
    if file.object_id is not None:
        if tree.objects is None:
            raise DamagedError(f"object {file.object_id} is not in the repository")
        kind, content = _opened(tree.objects, tree.commit).read(file.object_id)
        if kind != BLOB:
            raise DamagedError(f"a {kind} where a file should be")
        return content
    assert file.on_disk is not None
    # A link that replaced the file after the listing is not followed.
    descriptor = os.open(file.on_disk, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file")
        return opened.read(MAX_BYTES + 1)


@lru_cache(maxsize=4)
def _opened(folder: str, commit: str | None) -> Repository:
    # The commit is part of the key: a repository that changed between two runs of one process is opened again.
    return Repository(folder)
