"""Repositories in folders on disk: their roots, names and licences."""

from __future__ import annotations

import os
from collections.abc import Callable

from piledriver.corpus.raw.git.pack import DamagedError
from piledriver.corpus.raw.git.repository import Repository, is_repository
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.shared.repositories.commits import name_from
from piledriver.corpus.sources.shared.repositories.files import RepositoryTree
from piledriver.corpus.text.spdx import MAX_LICENCE_BYTES, is_licence_file, spdx_id


class Disk:
    """A cache of the repositories around the folders of one run."""

    def __init__(self) -> None:
        self._around: dict[str, str | None] = {}
        self._roots: dict[str, str | None] = {}
        self._trees: dict[str, RepositoryTree] = {}
        self._folders_only: dict[str, bool] = {}

    def repository_around(self, folder: str, base: str) -> str | None:
        """Return the bare repository or `.git` that a folder is in, not above the folder that the user named."""
        return _nearest(self._around, folder, base, is_repository)

    def tree_around(self, folder: str, base: str) -> RepositoryTree:
        """Return the checkout that a folder is in: where `.git` is, else the named folder or one right below it."""
        root = _nearest(self._roots, folder, base, lambda at: os.path.exists(os.path.join(at, ".git"))) or base
        if root == base and folder != base and self._holds_repositories(base):
            root = os.path.join(base, os.path.relpath(folder, base).split(os.sep)[0])
        if root not in self._trees:
            self._trees[root] = _tree_on_disk(root)
        return self._trees[root]

    def _holds_repositories(self, base: str) -> bool:
        """Return whether a folder holds only folders, each of which is then a repository."""
        if base not in self._folders_only:
            with os.scandir(base) as entries:
                files = any(e.name == ".git" or e.is_file(follow_symlinks=False) for e in entries)
            self._folders_only[base] = not files
        return self._folders_only[base]


def _nearest(cache: dict[str, str | None], folder: str, base: str, test: Callable[[str], bool]) -> str | None:
    """Return the nearest folder from `folder` up to `base` that passes the test, or `None`; cached by folder."""
    at, visited = folder, []
    while at not in cache:
        visited.append(at)
        if test(at):
            cache[at] = at
        elif at == base or len(at) <= len(base):
            cache[at] = None
        else:
            at = os.path.dirname(at)
    cache.update(dict.fromkeys(visited, cache[at]))
    return cache[folder]


def base_of(stream: RawStream) -> str:
    """Return the folder that the user named, from the path of a file in it; of a file named by itself, its folder."""
    assert stream.path is not None
    base = os.path.abspath(stream.path)
    for _ in range(max(1, stream.origin.count("/"))):
        base = os.path.dirname(base)
    return base


def origin_of(stream: RawStream, folder: str) -> str:
    """Return the name in origins of a folder that a file is in."""
    assert stream.path is not None
    below = os.path.relpath(stream.path, folder).count(os.sep) + 1
    return "/".join(stream.origin.split("/")[:-below]) or os.path.basename(folder)


def is_alone(git_folder: str) -> bool:
    """Return whether a `.git` folder has no work tree beside it."""
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
