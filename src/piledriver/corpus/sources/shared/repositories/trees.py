"""Source trees to pieces and documents: checkouts, bare repositories, archives of a repository.

A repository is a checkout with `.git`, a bare repository, an archive, or a folder; its licence is that of the licence
file at its root. Symbolic links and submodules are never followed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.raw.git.pack import DamagedError
from piledriver.corpus.raw.streams import RawStream, archive_kind
from piledriver.corpus.sources.base import Found, Piece, stop_at_damage
from piledriver.corpus.sources.shared.repositories.archives import ArchiveBatches
from piledriver.corpus.sources.shared.repositories.commits import repository_pieces
from piledriver.corpus.sources.shared.repositories.disk import Disk, base_of, is_alone, origin_of
from piledriver.corpus.sources.shared.repositories.files import (
    BATCH_FILES,
    FILE_BYTES,
    File,
    RepositoryTree,
    content_of,
)
from piledriver.corpus.sources.shared.repositories.rules import code_text, programming_language, why_not_by_name
from piledriver.corpus.text.spdx import spdx_header


def wants_file(name: str) -> bool:
    """Return whether it is not an archive: the rules need more than the name to decide."""
    return archive_kind(name) is None


def tree_pieces(streams: Iterator[RawStream]) -> Iterator[Piece | Refusal]:
    """Yield batches of files of one repository each, with its licence."""
    disk = Disk()
    seen: set[str] = set()
    batch = _Batch()
    archive = ArchiveBatches()
    for stream in streams:
        if stream.path is None:
            yield from batch.flush()
            yield from stop_at_damage(stream.origin, archive.add(stream))
            continue
        yield from archive.end()
        base = base_of(stream)
        folder = os.path.dirname(os.path.abspath(stream.path))
        repository = disk.repository_around(folder, base)
        if repository is not None:
            if repository not in seen:
                seen.add(repository)
                if repository == base or os.path.basename(repository) != ".git" or is_alone(repository):
                    yield from batch.flush()
                    yield from repository_pieces(repository, origin_of(stream, repository))
            continue
        tree = disk.tree_around(folder, base)
        path = os.path.relpath(os.path.abspath(stream.path), tree.root).replace(os.sep, "/")
        yield from batch.add(tree, File(stream.origin, path, on_disk=stream.path))
    yield from archive.end()
    yield from batch.flush()


class _Batch:
    """Files of one tree that wait to become a piece."""

    def __init__(self) -> None:
        self._tree: RepositoryTree | None = None
        self._files: list[File] = []

    def add(self, tree: RepositoryTree, file: File) -> Iterator[Piece]:
        if self._tree != tree:
            yield from self.flush()
        self._tree = tree
        self._files.append(file)
        if len(self._files) >= BATCH_FILES:
            yield from self.flush()

    def flush(self) -> Iterator[Piece]:
        if self._files:
            size = FILE_BYTES * len(self._files)
            yield Piece(self._files[0].origin, length=size, extra=(self._tree, self._files))
        self._files = []


def tree_documents(piece: Piece) -> Iterator[Found]:
    """Yield every file of a piece that the rules accept, each with its own meta."""
    tree: RepositoryTree = piece.extra[0]
    files: list[File] = piece.extra[1]
    for file in files:
        reason = why_not_by_name(file.path)
        if reason is not None:
            yield Refusal(reason, file.origin)
            continue
        try:
            content = content_of(file, tree)
        except (OSError, DamagedError) as error:
            yield Refusal("unreadable file", file.origin, str(error))
            continue
        text, reason = code_text(content)
        if reason is not None:
            yield Refusal(reason, file.origin)
            continue
        meta: dict[str, Any] = {
            "origin": file.origin,
            "licence": spdx_header(text) or tree.licence or "unknown",
            "repo_name": tree.name,
            "file_name": file.path,
            "language": programming_language(file.path),
            "commit": tree.commit,
        }
        yield Document(text, meta={key: value for key, value in meta.items() if value})
