"""Items of Hacker News from any of their exports, and threads of items, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from piledriver.corpus.document import Refusal
from piledriver.corpus.raw.limits import read_all
from piledriver.corpus.raw.partial_reads import peek_head
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.base import MAX_PIECE_BYTES
from piledriver.corpus.sources.shared.disk_table import DiskTable
from piledriver.corpus.sources.shared.line_pieces import line_pieces, piece_lines

_HEAD_BYTES = 1 << 16
_BATCH = 5_000
_MOST_COMMENTS = 100_000
_PARENTS = 500
Item = dict[str, Any]


def read_items(stream: RawStream) -> Iterator[Item | Refusal]:
    """Yield every item of a file: one object (alone or nested as from Algolia), an array, or one object a line."""
    head, rest = peek_head(stream.file, _HEAD_BYTES)
    if _is_lines(head):
        for piece in line_pieces(RawStream(stream.origin, stream.name, content=rest)):
            for line in [piece] if isinstance(piece, Refusal) else piece_lines(piece):
                if isinstance(line, Refusal):
                    yield line
                else:
                    yield from _decoded(line[1], f"{stream.origin}#{line[0]}")
        return
    content = read_all(rest, MAX_PIECE_BYTES, "one JSON value is read whole: write one item a line")
    yield from _decoded(content, stream.origin)


def _is_lines(head: bytes) -> bool:
    """Return whether the first line is a whole value and more follow."""
    first, newline, more = head.partition(b"\n")
    if not newline:
        # One long line or the whole file: an array is decoded whole, an object may be the first of many.
        return len(head) == _HEAD_BYTES and head.lstrip()[:1] == b"{"
    try:
        msgspec.json.decode(first)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return False
    return bool(more.strip())


def _decoded(content: bytes, origin: str) -> Iterator[Item | Refusal]:
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        yield Refusal("invalid json", origin, str(error)[:200])
        return
    yield from _flat(value, origin)


def _flat(value: Any, origin: str) -> Iterator[Item | Refusal]:
    """Yield each item of a nested response, its fields under the names of the official interface."""
    waiting: list[Any] = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += reversed(value)
        elif isinstance(value, dict):
            inner = next((value[key] for key in ("hits", "items", "results") if isinstance(value.get(key), list)), None)
            if inner is not None:
                waiting += reversed(inner)
                continue
            item = _item(value)
            if item is None:
                yield Refusal("item without id", origin, str(list(value))[:200])
                continue
            children = value.get("children")
            if isinstance(children, list):
                nested = [child for child in children if isinstance(child, dict)]
                item["kids"] = [_number(child.get("id")) for child in nested]
                for child in nested:
                    child.setdefault("parent_id", item["id"])
                waiting += reversed(nested)
            yield item
        elif value is not None:
            # The interface returns `null` for an item that it does not show.
            yield Refusal("not an item", origin, str(value)[:100])


def _item(value: Item) -> Item | None:
    number = _number(value.get("id", value.get("objectID")))
    if number is None:
        return None
    item = {
        "id": number,
        "parent": _number(value.get("parent", value.get("parent_id"))),
        "type": _text(value, "type") or _kind(value),
        "by": _text(value, "by") or _text(value, "author"),
        "title": _text(value, "title"),
        "url": _text(value, "url"),
        "text": next((value[k] for k in ("text", "comment_text", "story_text") if isinstance(value.get(k), str)), None),
        "score": _number(value.get("score", value.get("points"))),
        "time": _number(value.get("time", value.get("created_at_i"))),
        "descendants": _number(value.get("descendants", value.get("num_comments"))),
        "kids": [kid for kid in value["kids"] if isinstance(kid, int)] if isinstance(value.get("kids"), list) else None,
        "dead": _true(value.get("dead")),
        "deleted": _true(value.get("deleted")),
    }
    return {name: found for name, found in item.items() if found is not None and found is not False}


def _text(value: Item, name: str) -> str | None:
    found = value.get(name)
    return found if isinstance(found, str) else None


def _kind(value: Item) -> str:
    tags = value.get("_tags")
    if isinstance(tags, list) and tags and isinstance(tags[0], str):
        return tags[0]
    return "story" if value.get("title") else "comment"


def _number(value: Any) -> int | None:
    """Return a 64-bit integer, also where an export wrote it as text or as a float; else `None`."""
    if value is None or (type(value) is int and -(1 << 62) < value < 1 << 62):
        return value
    try:
        number = int(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    except (ValueError, OverflowError):
        return None
    return number if number is not None and abs(number) < 1 << 62 else None


def _true(value: Any) -> bool:
    return value is True or value in ("true", "True", "t", 1)


class CommentThreads(DiskTable):
    """Items by their number and parent, on disk."""

    def __init__(self) -> None:
        super().__init__("CREATE TABLE items (id INTEGER PRIMARY KEY, parent INTEGER, origin TEXT, item BLOB);")
        self._batch: list[tuple[int, int | None, str, bytes]] = []

    def add(self, item: Item, origin: str) -> None:
        """Add an item; the last one of a number counts."""
        self._batch.append((item["id"], item.get("parent"), origin, msgspec.json.encode(item)))
        if len(self._batch) >= _BATCH:
            self._write()

    def _write(self) -> None:
        self._table.execute("BEGIN")
        self._table.executemany("INSERT OR REPLACE INTO items VALUES (?,?,?,?)", self._batch)
        self._table.execute("COMMIT")
        self._batch.clear()

    def roots(self) -> Iterator[tuple[str, Item]]:
        """Yield (origin, item) of everything that is no reply, by number."""
        self._write()
        self._table.execute("CREATE INDEX IF NOT EXISTS by_parent ON items (parent)")
        for origin, content in self._table.execute("SELECT origin, item FROM items WHERE parent IS NULL ORDER BY id"):
            yield origin, msgspec.json.decode(content)

    def orphans(self) -> Iterator[tuple[str, int, int]]:
        """Yield (origin, number, parent) of replies to missing items."""
        query = (
            "SELECT a.origin, a.id, a.parent FROM items a LEFT JOIN items b ON a.parent = b.id"
            " WHERE a.parent IS NOT NULL AND b.id IS NULL ORDER BY a.id"
        )
        yield from self._table.execute(query)

    def replies(self, number: int) -> list[msgspec.Raw]:
        """Return the replies below an item, to any depth, level by level, as JSON."""
        found: list[msgspec.Raw] = []
        seen = {number}
        level = [number]
        while level and len(found) < _MOST_COMMENTS:
            below: list[int] = []
            for start in range(0, len(level), _PARENTS):
                parents = level[start : start + _PARENTS]
                query = f"SELECT id, item FROM items WHERE parent IN ({','.join('?' * len(parents))}) ORDER BY id"
                for child, content in self._table.execute(query, parents):
                    if child not in seen:
                        seen.add(child)
                        below.append(child)
                        found.append(msgspec.Raw(content))
            level = below
        return found
