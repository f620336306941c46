"""The files of the newest commit of a repository, from git's own storage."""

from __future__ import annotations

import os
from collections.abc import Iterator

from piledriver.corpus.document import Refusal
from piledriver.corpus.raw.git.pack import DamagedError
from piledriver.corpus.raw.git.repository import BLOB, Repository, TreeEntry
from piledriver.corpus.sources.base import Piece
from piledriver.corpus.sources.shared.repositories.files import BATCH_FILES, FILE_BYTES, File, RepositoryTree
from piledriver.corpus.text.spdx import MAX_LICENCE_BYTES, is_licence_file, spdx_id


def repository_pieces(folder: str, origin: str) -> Iterator[Piece | Refusal]:
    """Yield the files of HEAD of a bare repository in batches."""
    try:
        repository = Repository(folder)
        commit = repository.head()
        entries = list(repository.entries(commit))
        licence = _licence_among(repository, entries)
    except (DamagedError, OSError) as error:
        yield Refusal("unreadable repository", origin, str(error))
        return
    folder_name = os.path.basename(os.path.dirname(os.path.abspath(folder)))
    plain = os.path.basename(folder).removesuffix(".git") or folder_name
    tree = RepositoryTree(name_from(repository.url) or plain, licence, commit, folder)
    files: list[File] = []
    for entry in entries:
        where = f"{origin}#{entry.path}"
        if entry.kind != BLOB:
            yield Refusal(entry.kind, where)
            continue
        files.append(File(where, entry.path, object_id=entry.object_id))
        if len(files) >= BATCH_FILES:
            yield Piece(files[0].origin, length=FILE_BYTES * len(files), extra=(tree, files))
            files = []
    if files:
        yield Piece(files[0].origin, length=FILE_BYTES * len(files), extra=(tree, files))


def _licence_among(repository: Repository, entries: list[TreeEntry]) -> str | None:
    for entry in entries:
        if entry.kind == BLOB and "/" not in entry.path and is_licence_file(entry.path):
            try:
                _, content = repository.read(entry.object_id)
            except DamagedError:
                continue
            found = spdx_id(content[:MAX_LICENCE_BYTES].decode("utf-8", "replace"))
            if found is not None:
                return found
    return None


def name_from(url: str) -> str:
    """Return `owner/name` from the address of a remote."""
    parts = url.removesuffix("/").removesuffix(".git").replace(":", "/").split("/")
    return "/".join(parts[-2:]) if len(parts) >= 2 and "@" not in parts[-1] else ""
