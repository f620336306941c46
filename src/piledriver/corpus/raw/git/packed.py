"""Bare repositories inside archives: their storage is put into a temporary folder, because packs are read at random."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from piledriver.corpus.document import Refusal
from piledriver.corpus.raw.git.repository import is_repository

MAX_STORED_BYTES = 1 << 32


class PackedRepositories:
    """What was taken out of one archive; the names of the files were checked by a pattern before they come here."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="piledriver-git-")
        self._prefixes: dict[str, str] = {}
        self._bytes = 0

    def add(self, prefix: str, name: str, content: BinaryIO, origin: str) -> Iterator[Refusal]:
        """One file of the storage of the repository below `prefix`."""
        if prefix not in self._prefixes:
            self._prefixes[prefix] = os.path.join(self._folder.name, f"{len(self._prefixes)}.git")
            os.makedirs(os.path.join(self._prefixes[prefix], "refs"))
        if ".." in name.split("/"):
            return
        path = os.path.join(self._prefixes[prefix], name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            while chunk := content.read(1 << 20):
                self._bytes += len(chunk)
                if self._bytes > MAX_STORED_BYTES:
                    yield Refusal("too large", origin, f"more than {MAX_STORED_BYTES} bytes of git objects")
                    return
                file.write(chunk)

    def prefixes(self) -> list[str]:
        """Where in the archive there is a repository."""
        return [prefix for prefix, folder in self._prefixes.items() if is_repository(folder)]

    def folder(self, prefix: str) -> str:
        """Where the storage of a repository is for now."""
        return self._prefixes[prefix]

    def close(self) -> None:
        """Nothing stays on disk."""
        self._folder.cleanup()
