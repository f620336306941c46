"""A git repository on disk: the files of its HEAD, read without running anything."""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from piledriver.corpus.raw.git.pack import MAX_OBJECT_BYTES, DamagedError, Pack, apply_delta, inflate

_REF = re.compile(r"refs/[\w./+@#=,%-]{1,250}")
_HEX = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_URL = re.compile(r'\[remote "origin"\][^\[]*?\burl\s*=\s*(\S+)')
_MAX_DEPTH = 200
_MAX_ENTRIES = 5_000_000

BLOB, LINK, MODULE = "blob", "symbolic link", "submodule"


@dataclass(frozen=True)
class TreeEntry:
    """A path in a tree: a file, a symbolic link or a submodule."""

    path: str
    kind: str
    object_id: str


def is_repository(folder: str) -> bool:
    """Return whether a folder is a bare repository or a `.git` folder."""
    return (
        os.path.isdir(os.path.join(folder, "objects"))
        and os.path.isfile(os.path.join(folder, "HEAD"))
        and (os.path.isdir(os.path.join(folder, "refs")) or os.path.isfile(os.path.join(folder, "packed-refs")))
    )


class Repository:
    """Objects by id. Alternates, grafts, hooks, filters and configured commands are ignored."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        config = self._small_file("config")
        self.hash_bytes = 32 if re.search(r"objectformat\s*=\s*sha256", config, re.IGNORECASE) else 20
        url = _URL.search(config)
        self.url = url.group(1) if url else ""
        self._packs: list[Pack] = []
        packs = os.path.join(folder, "objects", "pack")
        for name in sorted(os.listdir(packs)) if os.path.isdir(packs) else []:
            if name.endswith(".idx") and os.path.isfile(os.path.join(packs, name.removesuffix(".idx") + ".pack")):
                self._packs.append(Pack(os.path.join(packs, name), self.hash_bytes))

    def head(self) -> str:
        """Return the id of the commit that HEAD names."""
        value = self._small_file("HEAD").strip()
        for _ in range(5):
            if _HEX.fullmatch(value):
                return value
            name = value.removeprefix("ref:").strip()
            if not _REF.fullmatch(name) or ".." in name:
                break
            value = self._small_file(name).strip() or self._packed_ref(name)
        # A mirror whose HEAD names a missing branch may have others.
        first = re.search(rf"(?m)^({_HEX.pattern}) refs/heads/", self._small_file("packed-refs", 1 << 24))
        if first is None:
            raise DamagedError("HEAD does not name a commit")
        return first.group(1)

    def entries(self, commit: str) -> Iterator[TreeEntry]:
        """Yield every entry in the tree of a commit, in git's order of paths."""
        kind, content = self.read(commit)
        for _ in range(5):
            if kind != "tag":
                break
            kind, content = self.read(content[7 : 7 + 2 * self.hash_bytes].decode("ascii", "replace"))
        if kind != "commit" or not content.startswith(b"tree "):
            raise DamagedError("HEAD is not a commit")
        root = content[5 : 5 + 2 * self.hash_bytes].decode("ascii", "replace")
        stack: list[tuple[str, str, str, int]] = [("", "tree", root, 0)]
        seen = 0
        while stack:
            path, kind, object_id, depth = stack.pop()
            seen += 1
            if seen > _MAX_ENTRIES or depth > _MAX_DEPTH:
                raise DamagedError("endless tree")
            if kind != "tree":
                yield TreeEntry(path, kind, object_id)
                continue
            inner = [(f"{path}/{name}" if path else name, k, i, depth + 1) for name, k, i in self._tree(object_id)]
            stack.extend(reversed(inner))

    def read(self, object_id: str) -> tuple[str, bytes]:
        """Return the kind and content of an object; raise `DamagedError` where it is missing or damaged."""
        if not _HEX.fullmatch(object_id):
            raise DamagedError(f"not an object id: {object_id[:80]!r}")
        deltas: list[bytes] = []
        for _ in range(100):
            loose = self._loose(object_id)
            if loose is not None:
                kind, content = loose
                break
            binary = bytes.fromhex(object_id)
            pack, offset = next(((p, at) for p in self._packs if (at := p.find(binary)) is not None), (None, 0))
            if pack is None:
                raise DamagedError(f"object {object_id} is not in the repository")
            found, content, more = pack.read(offset)
            deltas.extend(more)
            if isinstance(found, str):
                kind = found
                break
            object_id = found.hex()
        else:
            raise DamagedError("endless chain of deltas")
        for delta in reversed(deltas):
            content = apply_delta(content, delta)
        return kind, content

    def _tree(self, object_id: str) -> Iterator[tuple[str, str, str]]:
        kind, content = self.read(object_id)
        if kind != "tree":
            raise DamagedError("tree entry is not a tree")
        at = 0
        while at < len(content):
            space, end = content.find(b" ", at), content.find(b"\0", at)
            if not at < space < end or end + 1 + self.hash_bytes > len(content):
                raise DamagedError("truncated tree")
            mode = content[at:space]
            name = content[space + 1 : end].decode("utf-8", "replace")
            at = end + 1 + self.hash_bytes
            found = {b"40000": "tree", b"040000": "tree", b"120000": LINK, b"160000": MODULE}.get(mode, BLOB)
            yield name.replace("/", "_"), found, content[end + 1 : at].hex()

    def _loose(self, object_id: str) -> tuple[str, bytes] | None:
        path = os.path.join(self._folder, "objects", object_id[:2], object_id[2:])
        try:
            with open(path, "rb") as file:
                raw = file.read(MAX_OBJECT_BYTES + 1)
        except OSError:
            return None
        try:
            head = zlib.decompressobj().decompress(raw, 64)
        except zlib.error as error:
            raise DamagedError(str(error)) from None
        header, nul, _ = head.partition(b"\0")
        kind, _, size = header.decode("ascii", "replace").partition(" ")
        if not nul or not size.isdigit():
            raise DamagedError("loose object without header")
        content = inflate(raw, int(size) + len(header) + 1)
        return kind, content[len(header) + 1 :]

    def _packed_ref(self, name: str) -> str:
        found = re.search(rf"(?m)^({_HEX.pattern}) {re.escape(name)}$", self._small_file("packed-refs", 1 << 24))
        return found.group(1) if found else ""

    def _small_file(self, name: str, limit: int = 1 << 16) -> str:
        path = os.path.join(self._folder, name)
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                return ""
            with open(path, "rb") as file:
                return file.read(limit).decode("utf-8", "replace")
        except OSError:
            return ""
