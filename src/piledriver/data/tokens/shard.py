"""One shard of tokens: four `.npy` files and a small JSON note, readable with numpy alone.

- `NAME.tokens.npy`: the ids, one document after the other; each begins with the boundary token.
- `NAME.starts.npy`: where each document begins in the tokens, and the end.
- `NAME.index.npy`: a row per document (and a last one for the end): where its bytes begin if all texts were laid end to
  end, its group, where its id and origin begin in the names.
- `NAME.names.npy`: ids and origins as UTF-8 bytes.
- `NAME.json`: counts, the groups (source and licence), sizes and checksums of the files. Written last: it says that
  the shard is whole.

Documents stand grouped by source and licence, so that each group is one stretch of tokens: leaving a source out, or
weighing it, never touches the others.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from piledriver.core import storage

Tokens = npt.NDArray[np.unsignedinteger[Any]]
INDEX = np.dtype([("byte", "<u8"), ("group", "<u4"), ("id", "<u8"), ("origin", "<u8")])
FILES = ("tokens", "starts", "index", "names")


@dataclass(frozen=True)
class TokenDocument:
    """One document on its way into a shard."""

    ids: Tokens
    byte_count: int
    source: str
    licence: str
    id: str
    origin: str


def token_dtype(vocab_size: int) -> str:
    """The smallest type that holds every id of a vocabulary.

    >>> token_dtype(50257), token_dtype(128256)
    ('<u2', '<u4')
    """
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


def write_shard(folder: storage.Location, name: str, documents: list[TokenDocument], boundary: int, dtype: str) -> None:
    """Write a shard; its note comes last, so that a shard that was interrupted does not count."""
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
    note = {
        "name": name,
        "documents": len(documents),
        "tokens": len(tokens),
        "bytes": int(index["byte"][-1]),
        "max_token": int(tokens.max(initial=0)),
        "groups": groups,
        "files": files,
    }
    storage.write_text(storage.join(folder, f"{name}.json"), json.dumps(note, ensure_ascii=False, indent=1) + "\n")


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
