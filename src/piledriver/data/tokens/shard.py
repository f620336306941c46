"""Token shard: four `.npy` files and a JSON file, readable with numpy alone.

- `NAME.tokens.npy`: the ids of all documents, concatenated; each document begins with the boundary token.
- `NAME.starts.npy`: the first token of each document, and the end.
- `NAME.index.npy`: one row per document, and a last one for the end: its offset in the concatenated texts in bytes, its
  group, the offsets of its id and origin in the names.
- `NAME.names.npy`: ids and origins as UTF-8 bytes.
- `NAME.json`: counts, groups (source and licence), sizes and checksums of the files. Written last: with it the shard is
  complete.

Documents are grouped by source and licence, so that each group is one range of tokens: excluding or weighting a source
does not touch the others.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from piledriver.core import storage
from piledriver.core.errors import CorruptFileError
from piledriver.data.tokens.manifest import AGAIN

Tokens = npt.NDArray[np.unsignedinteger[Any]]
INDEX = np.dtype([("byte", "<u8"), ("group", "<u4"), ("id", "<u8"), ("origin", "<u8")])
FILES = ("tokens", "starts", "index", "names")
Check = Literal["sizes", "index", "all"]
"""What to verify: sizes; also checksums of the small files; or of everything."""
REMOVE = f"remove it and {AGAIN}"


@dataclass(frozen=True)
class TokenDocument:
    """A document to write to a shard."""

    ids: Tokens
    byte_count: int
    source: str
    licence: str
    id: str
    origin: str


def token_dtype(vocab_size: int) -> str:
    """Return the smallest dtype that holds every id of a vocabulary.

    >>> token_dtype(50257), token_dtype(128256)
    ('<u2', '<u4')
    """
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def write_shard(folder: storage.Location, name: str, documents: list[TokenDocument], boundary: int, dtype: str) -> None:
    """Write a shard; its metadata comes last, so that an interrupted shard does not count."""
    keys = sorted({(document.source, document.licence) for document in documents})
    group_of = {key: number for number, key in enumerate(keys)}
    ordered = sorted(documents, key=lambda document: group_of[document.source, document.licence])
    tokens, starts, index, names = _arrays(ordered, group_of, boundary, dtype)
    files = {}
    arrays: tuple[npt.NDArray[Any], ...] = (tokens, starts, index, names)
    for kind, array in zip(FILES, arrays, strict=True):
        content = _npy(array)
        files[kind] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        storage.write_bytes(storage.join(folder, f"{name}.{kind}.npy"), content)
    groups = []
    for number, (source, licence) in enumerate(keys):
        first, last = np.searchsorted(index["group"][:-1], [number, number + 1])
        groups.append(
            {
                "source": source,
                "licence": licence,
                "documents": int(last - first),
                "tokens": int(starts[last] - starts[first]),
                "bytes": int(index["byte"][last] - index["byte"][first]),
            }
        )
    metadata = {
        "name": name,
        "documents": len(documents),
        "tokens": len(tokens),
        "bytes": int(index["byte"][-1]),
        "max_token": int(tokens.max(initial=0)),
        "groups": groups,
        "files": files,
    }
    storage.write_text(storage.join(folder, f"{name}.json"), json.dumps(metadata, ensure_ascii=False, indent=1) + "\n")


def _arrays(
    documents: list[TokenDocument], group_of: dict[tuple[str, str], int], boundary: int, dtype: str
) -> tuple[Tokens, npt.NDArray[np.int64], npt.NDArray[np.void], npt.NDArray[np.uint8]]:
    index = np.zeros(len(documents) + 1, INDEX)
    starts = np.cumsum([0, *(len(document.ids) + 1 for document in documents)], dtype="<i8")
    index["byte"][1:] = np.cumsum(
        np.fromiter((document.byte_count for document in documents), np.int64, len(documents))
    )
    names = bytearray()
    tokens = np.empty(int(starts[-1]), np.dtype(dtype))
    edges = starts.tolist()
    for row, document in enumerate(documents):
        tokens[edges[row]] = boundary
        tokens[edges[row] + 1 : edges[row + 1]] = document.ids
        index["group"][row] = group_of[document.source, document.licence]
        index["id"][row] = len(names)
        names += document.id.encode("utf-8")
        index["origin"][row] = len(names)
        names += document.origin.encode("utf-8")
    index[-1]["group"] = len(group_of)
    index[-1]["id"] = index[-1]["origin"] = len(names)
    return tokens, starts, index, np.frombuffer(bytes(names), np.uint8)


def _npy(array: npt.NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


class TokenShard:
    """A memory-mapped shard."""

    def __init__(self, folder: str, metadata: dict[str, Any], dtype: str) -> None:
        self.folder, self.metadata = folder, metadata
        self.name: str = metadata["name"]
        self._dtype = np.dtype(dtype)

    @cached_property
    def tokens(self) -> Tokens:
        """The ids, as a plain array over the memory map (slicing a `np.memmap` is slower)."""
        return self._load("tokens", self._dtype, self.metadata["tokens"])

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """The first token of each document, and the end."""
        starts = self._load("starts", np.dtype("<i8"), self.metadata["documents"] + 1)
        if starts[0] != 0 or starts[-1] != self.metadata["tokens"] or np.any(starts[1:] <= starts[:-1]):
            raise CorruptFileError(f"{self._path('starts')}: documents are not in order", fix=REMOVE)
        return starts

    @cached_property
    def index(self) -> npt.NDArray[np.void]:
        """One row per document, and one for the end."""
        return self._load("index", INDEX, self.metadata["documents"] + 1)

    @cached_property
    def names(self) -> npt.NDArray[np.uint8]:
        """Ids and origins as UTF-8 bytes."""
        return self._load("names", np.dtype(np.uint8), int(self.index["id"][-1]))

    def check(self, how: Check) -> None:
        """Compare sizes, and checksums of the index or of everything, with the metadata."""
        for kind in FILES:
            path, expected = self._path(kind), self.metadata["files"][kind]
            if not storage.exists(path):
                raise CorruptFileError(f"{path} is missing", fix=AGAIN)
            found = storage.size(path)
            if found != expected["bytes"]:
                state = "truncated" if found < expected["bytes"] else "too long"
                raise CorruptFileError(f"{path} is {state}: {found} bytes instead of {expected['bytes']}", fix=AGAIN)
            if (how == "all" or (how == "index" and kind != "tokens")) and storage.sha256(path) != expected["sha256"]:
                raise CorruptFileError(f"{path} is damaged: its checksum differs", fix=REMOVE)

    def _path(self, kind: str) -> str:
        return storage.join(self.folder, f"{self.name}.{kind}.npy")

    def _load(self, kind: str, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
        path = self._path(kind)
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise CorruptFileError(f"{path} cannot be read: {error}", fix=REMOVE) from error
        if array.dtype != dtype or array.shape != (length,):
            raise CorruptFileError(f"{path} holds {array.dtype} {array.shape}, not {dtype} ({length},)", fix=REMOVE)
        return cast(npt.NDArray[Any], array.view(np.ndarray))
