"""Reddit submissions with their scores: Pushshift dumps read into a table on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
import xxhash

from piledriver.corpus.document import Refusal
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.shared.disk_table import DiskTable
from piledriver.corpus.sources.shared.line_pieces import line_pieces, piece_lines

_BATCH = 20_000
_MOST_SUBMISSIONS = 50


class Submission(msgspec.Struct, frozen=True):
    """The fields of a dump's line that are used; the decoder skips others."""

    url: str | None = None
    score: float | str | None = None
    id: str | None = None
    subreddit: str | None = None
    title: str | None = None
    created_utc: float | str | None = None
    is_self: bool | None = None


_decode = msgspec.json.Decoder(Submission)


def url_key(url: str) -> str | None:
    """Return the normal form of an address, without scheme, `www.` and fragment; `None` where it is not a web address.

    >>> url_key("HTTP://www.Example.com:80/a/#top"), url_key("self.python"), url_key("https://[bad")
    ('example.com/a', None, None)
    """
    try:
        parts = urlsplit(url.strip())
        host, port = (parts.hostname or "").removeprefix("www."), parts.port
    except ValueError:
        return None
    if parts.scheme.lower() not in ("http", "https") or "." not in host:
        return None
    shown_port = f":{port}" if port not in (None, 80, 443) else ""
    return f"{host}{shown_port}{parts.path.rstrip('/')}" + (f"?{parts.query}" if parts.query else "")


class Submissions(DiskTable):
    """Scores by address, and the set of addresses already used, on disk."""

    def __init__(self) -> None:
        super().__init__(
            "CREATE TABLE scores (key INTEGER PRIMARY KEY, score REAL, seen TEXT);"
            "CREATE TABLE used (key INTEGER PRIMARY KEY) WITHOUT ROWID;"
        )
        self.count = 0

    def add_dump(self, stream: RawStream) -> Iterator[Refusal]:
        """Read one dump; yield a refusal for each line that is not a submission."""
        batch: list[Submission] = []
        for piece in line_pieces(stream):
            if isinstance(piece, Refusal):
                yield piece
                continue
            for item in piece_lines(piece):
                if isinstance(item, Refusal):
                    yield item
                    continue
                try:
                    batch.append(_decode.decode(item[1]))
                except (msgspec.DecodeError, ValueError, RecursionError) as error:
                    yield Refusal("invalid submission", f"{piece.origin}#{item[0]}", str(error)[:200])
                if len(batch) >= _BATCH:
                    self._add(batch)
                    batch = []
        self._add(batch)

    def _add(self, batch: Iterable[Submission]) -> None:
        sums: dict[int, tuple[float, list[dict[str, Any]]]] = {}
        for submission in batch:
            key = url_key(submission.url) if submission.url and not submission.is_self else None
            if key is None:
                continue
            score = _number(submission.score)
            described = {
                "id": submission.id,
                "subreddit": submission.subreddit,
                "title": submission.title,
                "score": score,
                "created_utc": _number(submission.created_utc),
            }
            before, seen = sums.get(_hash(key), (0.0, []))
            sums[_hash(key)] = (before + score, [*seen, described][:_MOST_SUBMISSIONS])
            self.count += 1
        self._table.execute("BEGIN")
        for number, (score, seen) in sums.items():
            row = self._table.execute("SELECT score, seen FROM scores WHERE key=?", (number,)).fetchone()
            if row is not None:
                score, seen = score + row[0], (json.loads(row[1]) + seen)[:_MOST_SUBMISSIONS]
            self._table.execute("INSERT OR REPLACE INTO scores VALUES (?,?,?)", (number, score, json.dumps(seen)))
        self._table.execute("COMMIT")

    def of(self, key: str) -> tuple[float, list[dict[str, Any]]] | None:
        """Return (sum of scores, submissions) of an address, or `None` where it was never submitted."""
        row = self._table.execute("SELECT score, seen FROM scores WHERE key=?", (_hash(key),)).fetchone()
        return None if row is None else (row[0], json.loads(row[1]))

    def use(self, key: str) -> bool:
        """Mark an address as used; return whether it was not before."""
        return self._table.execute("INSERT OR IGNORE INTO used VALUES (?)", (_hash(key),)).rowcount == 1


def _hash(key: str) -> int:
    return int(xxhash.xxh3_64_intdigest(key.encode("utf-8", "replace"))) - (1 << 63)


def _number(value: float | str | None) -> float:
    try:
        return float(value) if value is not None else 0.0
    except ValueError:
        return 0.0
