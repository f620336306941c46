"""Source trees to pieces and documents: checkouts, bare repositories, archives of a repository.

A repository is told from its neighbours by its `.git`, by being a bare one, by its archive, or by its folder; its
licence is that of the licence file at its root. Symbolic links and submodules are never followed.
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec

from piledriver.corpus.code_rules import MAX_BYTES, code_text, language_of, why_not_by_name
from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.git.pack import DamagedError
from piledriver.corpus.git.packed import PackedRepositories
from piledriver.corpus.git.repository import BLOB, Entry, Repository, is_repository
from piledriver.corpus.licences import MAX_LICENCE_BYTES, is_licence_file, spdx_header, spdx_id
from piledriver.corpus.source import Found, Piece
from piledriver.corpus.streams import RawStream, archive_kind

# The files of a git repository's storage, inside whatever folder of an archive it is in.
_STORED = re.compile(
    r"((?:[^/]+/){0,20}?)(HEAD|packed-refs|config|objects/pack/pack-[0-9a-f]{40,64}\.(?:pack|idx)"
    r"|objects/[0-9a-f]{2}/[0-9a-f]{38,62}|refs/(?:heads|tags)/[\w./+-]{1,200})"
)

_REFERENCES_BYTES = 1 << 24

BATCH_FILES = 64
BATCH_BYTES = 1 << 20
# About how long a file of code is, where it is not known yet.
_FILE_BYTES = 5000
# How much of an archive waits for the licence file, which usually comes early.
MAX_HELD_BYTES = 1 << 26


class Tree(msgspec.Struct, frozen=True):
    """A repository: its name, its licence, the commit that was read, and the folder of its objects where it is bare."""

    name: str
    licence: str | None = None
    commit: str | None = None
    objects: str | None = None
    root: str = ""


class File(msgspec.Struct, frozen=True):
    """One file of a tree: where it is from, its path in the tree, and its content, its place on disk or its object."""

    origin: str
    path: str
    content: bytes | None = None
    on_disk: str | None = None
    object_id: str | None = None


def wants(name: str) -> bool:
    """Every file that is not an archive: the rules need more than the name to decide."""
    return archive_kind(name) is None


def tree_pieces(streams: Iterator[RawStream]) -> Iterator[Piece | Refusal]:
    """Batches of files of one repository each, with its licence."""
    disk = _Disk()
    seen: set[str] = set()
    batch = _Batch()
    archive = _ArchiveBatches()
    for stream in streams:
        if stream.path is None:
            yield from batch.flush()
            yield from archive.add(stream)
            continue
        yield from archive.end()
        base = _base_of(stream)
        folder = os.path.dirname(os.path.abspath(stream.path))
        repository = disk.repository_around(folder, base)
        if repository is not None:
            if repository not in seen:
                seen.add(repository)
                if repository == base or os.path.basename(repository) != ".git" or _alone(repository):
                    yield from batch.flush()
                    yield from _repository_pieces(repository, _origin_of(stream, repository))
            continue
        tree = disk.tree_around(folder, base)
        path = (
            os.path.relpath(os.path.abspath(stream.path), tree.root).replace(os.sep, "/") if tree.root else stream.name
        )
        yield from batch.add(tree, File(stream.origin, path, on_disk=stream.path), _FILE_BYTES)
    yield from archive.end()
    yield from batch.flush()


class _Batch:
    """Files of one tree that wait to become a piece."""

    def __init__(self) -> None:
        self._tree: Tree | None = None
        self._files: list[File] = []
        self._bytes = 0

    def add(self, tree: Tree, file: File, size: int) -> Iterator[Piece]:
        if self._tree != tree:
            yield from self.flush()
        self._tree = tree
        self._files.append(file)
        self._bytes += size
        if len(self._files) >= BATCH_FILES or self._bytes >= BATCH_BYTES:
            yield from self.flush()

    def flush(self) -> Iterator[Piece]:
        if self._files:
            yield Piece(self._files[0].origin, length=self._bytes, extra=(self._tree, self._files))
        self._files, self._bytes = [], 0


class _ArchiveBatches:
    """The files of an archive, held back until its licence is known."""

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
        content = opened.read(MAX_BYTES + 1)
        if stored is not None:
            # Perhaps the storage of a bare repository, perhaps a file that is called `config`: the end will tell.
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
                for piece in _repository_pieces(folder, f"{self._archive}!{prefix}".rstrip("/!")):
                    yield _with_contents(piece) if isinstance(piece, Piece) else piece
            self._bare.close()
            self._bare = None
        yield from self._flush()
        self._archive = ""

    def _flush(self) -> Iterator[Piece]:
        tree = Tree(self._name, self._licence)
        for start in range(0, len(self._held), BATCH_FILES):
            files = self._held[start : start + BATCH_FILES]
            size = sum(len(file.content or b"") for file in files)
            yield Piece(files[0].origin, length=size, extra=(tree, files))
        self._held, self._bytes = [], 0


def _with_contents(piece: Piece) -> Piece:
    """A piece of a repository that will be gone when workers come to it: its files are read here."""
    tree, files = piece.extra
    loaded = []
    for file in files:
        try:
            loaded.append(File(file.origin, file.path, content=_content_of(file, tree)[: MAX_BYTES + 1]))
        except DamagedError:
            loaded.append(File(file.origin, file.path, object_id=file.object_id))
    size = sum(len(file.content or b"") for file in loaded)
    return Piece(piece.origin, length=size, extra=(Tree(tree.name, tree.licence, tree.commit), loaded))


def tree_documents(piece: Piece) -> Iterator[Found]:
    """Every file of a piece that the rules take, each with a meta of its own."""
    tree: Tree = piece.extra[0]
    files: list[File] = piece.extra[1]
    for file in files:
        reason = why_not_by_name(file.path)
        if reason is not None:
            yield Refusal(reason, file.origin)
            continue
        try:
            content = _content_of(file, tree)
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
            "language": language_of(file.path),
            "commit": tree.commit,
        }
        yield Document(text, meta={key: value for key, value in meta.items() if value})


def _content_of(file: File, tree: Tree) -> bytes:
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
    # Not followed even if somebody puts a link in its place between the listing and now.
    descriptor = os.open(file.on_disk, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("not a regular file")
        return opened.read(MAX_BYTES + 1)


@lru_cache(maxsize=4)
def _opened(folder: str, commit: str | None) -> Repository:
    # By the commit as well: a repository that changed between two runs of one process is opened again.
    return Repository(folder)


def _repository_pieces(folder: str, origin: str) -> Iterator[Piece | Refusal]:
    """The files of HEAD of a bare repository."""
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
    tree = Tree(_name_from(repository.url) or plain, licence, commit, folder)
    files: list[File] = []
    for entry in entries:
        where = f"{origin}#{entry.path}"
        if entry.kind != BLOB:
            yield Refusal(entry.kind, where)
            continue
        files.append(File(where, entry.path, object_id=entry.object_id))
        if len(files) >= BATCH_FILES:
            yield Piece(files[0].origin, length=_FILE_BYTES * len(files), extra=(tree, files))
            files = []
    if files:
        yield Piece(files[0].origin, length=_FILE_BYTES * len(files), extra=(tree, files))


def _licence_among(repository: Repository, entries: list[Entry]) -> str | None:
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


class _Disk:
    """What is known of the folders of one run: where repositories start, and what they are called and licensed."""

    def __init__(self) -> None:
        self._around: dict[str, str | None] = {}
        self._roots: dict[str, str] = {}
        self._trees: dict[str, Tree] = {}
        self._shelves: dict[str, bool] = {}

    def repository_around(self, folder: str, base: str) -> str | None:
        """The bare repository or `.git` that a folder is in, looking up no further than what the user named."""
        at, passed = folder, []
        while at not in self._around:
            passed.append(at)
            if is_repository(at):
                self._around[at] = at
            elif at == base or len(at) <= len(base):
                self._around[at] = None
            else:
                at = os.path.dirname(at)
        self._around.update(dict.fromkeys(passed, self._around[at]))
        return self._around[folder]

    def tree_around(self, folder: str, base: str) -> Tree:
        """The checkout that a folder is in: where `.git` is, else the named folder or one right below it."""
        at, passed = folder, []
        while at not in self._roots:
            passed.append(at)
            if os.path.exists(os.path.join(at, ".git")):
                self._roots[at] = at
            elif at == base or len(at) <= len(base):
                self._roots[at] = base
            else:
                at = os.path.dirname(at)
        root = self._roots[at]
        self._roots.update(dict.fromkeys(passed, root))
        if root == base and folder != base and self._holds_repositories(base):
            root = os.path.join(base, os.path.relpath(folder, base).split(os.sep)[0])
        if root not in self._trees:
            self._trees[root] = _tree_on_disk(root)
        return self._trees[root]

    def _holds_repositories(self, base: str) -> bool:
        """Whether a folder has nothing but folders in it: then each of them is a repository."""
        if base not in self._shelves:
            with os.scandir(base) as entries:
                self._shelves[base] = not any(e.name == ".git" or e.is_file(follow_symlinks=False) for e in entries)
        return self._shelves[base]


def _base_of(stream: RawStream) -> str:
    """The folder that the user named, from the path of a file in it; of a file that was named itself, its folder."""
    assert stream.path is not None
    base = os.path.abspath(stream.path)
    for _ in range(max(1, stream.origin.count("/"))):
        base = os.path.dirname(base)
    return base


def _origin_of(stream: RawStream, folder: str) -> str:
    assert stream.path is not None
    below = os.path.relpath(stream.path, folder).count(os.sep) + 1
    return "/".join(stream.origin.split("/")[:-below]) or os.path.basename(folder)


def _alone(git_folder: str) -> bool:
    """Whether there is a `.git` and no work tree beside it."""
    return os.listdir(os.path.dirname(git_folder)) == [".git"]


def _tree_on_disk(root: str) -> Tree:
    licence = None
    with os.scandir(root) as entries:
        for entry in sorted(entries, key=lambda e: e.name):
            if licence is None and entry.is_file(follow_symlinks=False) and is_licence_file(entry.name):
                with open(entry.path, "rb") as file:
                    licence = spdx_id(file.read(MAX_LICENCE_BYTES).decode("utf-8", "replace"))
    name, commit = os.path.basename(root), None
    git_folder = os.path.join(root, ".git")
    if os.path.isdir(git_folder) and is_repository(git_folder):
        try:
            repository = Repository(git_folder)
            name, commit = _name_from(repository.url) or name, repository.head()
        except (DamagedError, OSError):
            pass
    return Tree(name, licence, commit, None, root)


def _name_from(url: str) -> str:
    """`owner/name` from the address of a remote."""
    parts = url.removesuffix("/").removesuffix(".git").replace(":", "/").split("/")
    return "/".join(parts[-2:]) if len(parts) >= 2 and "@" not in parts[-1] else ""


def _archive_name(archive: str) -> str:
    name = os.path.basename(archive)
    for ending in (".gz", ".bz2", ".xz", ".zst", ".tar", ".zip", ".tgz", ".7z", ".txz", ".tbz2"):
        name = name.removesuffix(ending)
    return name
