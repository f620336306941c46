"""Archives of a repository: files wait until the licence is found; a bare repository is read from git's storage."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator

from piledriver.corpus.document import Refusal
from piledriver.corpus.raw.git.pack import DamagedError
from piledriver.corpus.raw.git.packed import PackedRepositories
from piledriver.corpus.raw.limits import read_at_most
from piledriver.corpus.raw.streams import RawStream, bare_name
from piledriver.corpus.sources.base import Piece
from piledriver.corpus.sources.shared.repositories.commits import repository_pieces
from piledriver.corpus.sources.shared.repositories.files import (
    BATCH_BYTES,
    BATCH_FILES,
    File,
    RepositoryTree,
    content_of,
)
from piledriver.corpus.sources.shared.repositories.rules import MAX_BYTES
from piledriver.corpus.text.spdx import MAX_LICENCE_BYTES, is_licence_file, spdx_id

# How much of an archive waits for the licence file, which usually comes early.
MAX_HELD_BYTES = 1 << 26
_REFERENCES_BYTES = 1 << 24
# The files of a git repository's storage, in any folder of an archive.
_STORED = re.compile(
    r"((?:[^/]+/){0,20}?)(HEAD|packed-refs|config|objects/pack/pack-[0-9a-f]{40,64}\.(?:pack|idx)"
    r"|objects/[0-9a-f]{2}/[0-9a-f]{38,62}|refs/(?:heads|tags)/[\w./+-]{1,200})"
)


class ArchiveBatches:
    """The files of an archive, held until its licence is known."""

    def __init__(self) -> None:
        self._archive = ""
        self._licence: str | None = None
        self._name = ""
        self._held: list[File] = []
        self._bytes = 0
        self._bare: PackedRepositories | None = None

    def add(self, stream: RawStream) -> Iterator[Piece | Refusal]:
        archive, _, inside = stream.origin.partition("!")
        if "!" in inside:
            yield Refusal("archive inside the repository", stream.origin)
            return
        if archive != self._archive:
            yield from self.end()
            self._archive, self._licence, self._name = archive, None, _archive_name(archive)
        parts = inside.split("/")
        if ".git" in parts:
            return
        stored = _STORED.fullmatch(inside)
        if stored is not None and stored.group(2).startswith("objects/"):
            yield from self._storage().add(stored.group(1), stored.group(2), stream.raw, stream.origin)
            return
        opened = stream.file
        content = read_at_most(opened, MAX_BYTES)
        if stored is not None:
            # The storage of a bare repository, or another file called `config`: only the whole archive tells.
            whole = io.BytesIO(content + opened.read(_REFERENCES_BYTES))
            yield from self._storage().add(stored.group(1), stored.group(2), whole, stream.origin)
        path = "/".join(parts[1:]) if len(parts) > 1 else inside
        if len(parts) <= 2 and is_licence_file(stream.name) and self._licence is None:
            self._licence = spdx_id(content[:MAX_LICENCE_BYTES].decode("utf-8", "replace"))
        self._held.append(File(stream.origin, path, content=content))
        self._bytes += len(content)
        if self._bytes >= (BATCH_BYTES if self._licence is not None else MAX_HELD_BYTES):
            yield from self._flush()

    def _storage(self) -> PackedRepositories:
        if self._bare is None:
            self._bare = PackedRepositories()
        return self._bare

    def end(self) -> Iterator[Piece | Refusal]:
        if self._bare is not None:
            for prefix in self._bare.prefixes():
                self._held = [file for file in self._held if not file.origin.startswith(f"{self._archive}!{prefix}")]
                folder = self._bare.folder(prefix)
                for piece in repository_pieces(folder, f"{self._archive}!{prefix}".rstrip("/!")):
                    yield _with_contents(piece) if isinstance(piece, Piece) else piece
            self._bare.close()
            self._bare = None
        yield from self._flush()
        self._archive = ""

    def _flush(self) -> Iterator[Piece]:
        tree = RepositoryTree(self._name, self._licence)
        for start in range(0, len(self._held), BATCH_FILES):
            files = self._held[start : start + BATCH_FILES]
            size = sum(len(file.content or b"") for file in files)
            yield Piece(files[0].origin, length=size, extra=(tree, files))
        self._held, self._bytes = [], 0


def _with_contents(piece: Piece) -> Piece:
    """Return the piece with its files read: workers cannot open the temporary copy of its repository."""
    tree, files = piece.extra
    loaded = []
    for file in files:
        try:
            loaded.append(File(file.origin, file.path, content=content_of(file, tree)[: MAX_BYTES + 1]))
        except DamagedError:
            loaded.append(File(file.origin, file.path, object_id=file.object_id))
    size = sum(len(file.content or b"") for file in loaded)
    return Piece(piece.origin, length=size, extra=(RepositoryTree(tree.name, tree.licence, tree.commit), loaded))


def _archive_name(archive: str) -> str:
    name = os.path.basename(archive)
    name = name[: len(bare_name(name))]
    for ending in (".tar", ".zip", ".tgz", ".7z", ".txz", ".tbz2"):
        name = name.removesuffix(ending)
    return name
