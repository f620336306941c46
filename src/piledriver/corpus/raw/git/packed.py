"""Bare repositories inside archives, copied to a temporary folder because packs need random access."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import BinaryIO

from piledriver.corpus.document import Refusal
from piledriver.corpus.raw.git.repository import is_repository

MAX_STORED_BYTES = 1 << 32


class PackedRepositories:
    """The repositories of one archive. The caller has checked file names against a pattern."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="piledriver-git-")
        self._prefixes: dict[str, str] = {}
        self._bytes = 0

    def add(self, prefix: str, name: str, content: BinaryIO, origin: str) -> Iterator[Refusal]:
        """Store one file of the repository below `prefix`; yield a refusal where all exceed the limit."""
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
        """Return the prefixes of the archive that hold a repository."""
        return [prefix for prefix, folder in self._prefixes.items() if is_repository(folder)]

    def folder(self, prefix: str) -> str:
        """Return the temporary folder of a repository."""
        return self._prefixes[prefix]

    def close(self) -> None:
        """Delete the temporary folder."""
        self._folder.cleanup()
