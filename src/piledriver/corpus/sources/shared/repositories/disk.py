"""Folders on disk: where a repository starts, what it is called and how it is licensed."""

from __future__ import annotations

import os

from piledriver.corpus.raw.git.pack import DamagedError
from piledriver.corpus.raw.git.repository import Repository, is_repository
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.shared.repositories.commits import name_from
from piledriver.corpus.sources.shared.repositories.files import RepositoryTree
from piledriver.corpus.text.spdx import MAX_LICENCE_BYTES, is_licence_file, spdx_id


class Disk:
    """What is known of the folders of one run: where repositories start, and what they are called and licensed."""

    def __init__(self) -> None:
        self._around: dict[str, str | None] = {}
        self._roots: dict[str, str] = {}
        self._trees: dict[str, RepositoryTree] = {}
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

    def tree_around(self, folder: str, base: str) -> RepositoryTree:
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


def base_of(stream: RawStream) -> str:
    """The folder that the user named, from the path of a file in it; of a file that was named itself, its folder."""
    assert stream.path is not None
    base = os.path.abspath(stream.path)
    for _ in range(max(1, stream.origin.count("/"))):
        base = os.path.dirname(base)
    return base


def origin_of(stream: RawStream, folder: str) -> str:
    """How a folder that a file is in is called in the origins of documents."""
    assert stream.path is not None
    below = os.path.relpath(stream.path, folder).count(os.sep) + 1
    return "/".join(stream.origin.split("/")[:-below]) or os.path.basename(folder)


def is_alone(git_folder: str) -> bool:
    """Whether there is a `.git` and no work tree beside it."""
    return os.listdir(os.path.dirname(git_folder)) == [".git"]


def _tree_on_disk(root: str) -> RepositoryTree:
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
            name, commit = name_from(repository.url) or name, repository.head()
        except (DamagedError, OSError):
            pass
    return RepositoryTree(name, licence, commit, None, root)
