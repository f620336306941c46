"""Ubuntu IRC: daily logs of channels, joined by channel and week."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from datetime import date
from typing import Any
from urllib.parse import unquote

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.raw.limits import damage_refusal, read_all
from piledriver.corpus.raw.partial_reads import DAMAGE, peek_head
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with
from piledriver.corpus.text.normalise import NotTextError, is_binary

MAX_DAY_BYTES = 1 << 26
# Days of one week are joined if no more than this lies between them in the input.
MAX_HELD_BYTES = 1 << 27
MAX_HELD_WEEKS = 20_000

_DATE = re.compile(r"(?<!\d)((?:19|20)\d\d)[-/_.]?(\d\d)[-/_.]?(\d\d)(?!\d)")
_CHANNEL = re.compile(r"#+[\w+.\[\]{}|^`-]*[\w]")
_CHANNEL_INSIDE = re.compile(rb"(?:has joined |has left |Topic for |Topic \()(#[\w+-]+)")
_STAMP = re.compile(r"\[\d\d?:\d\d(?::\d\d)?(?: ?[AP]M)?\] ?")
# Colours and bold of IRC programs: the numbers of the colours would stay when the control characters go.
_COLOURS = re.compile("\x03(?:\\d{1,2}(?:,\\d{1,2})?)?|[\x02\x0f\x16\x1d\x1f]")
_NOISE = ("has joined #", "has left #", "Topic for #", "Topic (#", "is now known as")

Day = tuple[str, str, str | None, bytes | None]
"""Date, origin, and the path or the content of a log."""


def _pieces(streams: Iterator[RawStream]) -> Iterator[Piece | Refusal]:
    """Yield one piece for each channel and ISO week: its days."""
    held: OrderedDict[tuple[str, str], list[Day]] = OrderedDict()
    held_bytes = 0

    def let_go() -> Piece:
        nonlocal held_bytes
        (channel, week), days = held.popitem(last=False)
        held_bytes -= sum(len(content) for *_, content in days if content is not None)
        days.sort(key=lambda day: (day[0], day[1]))
        size = sum(os.path.getsize(path) if path else len(content or b"") for *_, path, content in days)
        return Piece(days[0][1], length=size, extra=(channel, week, days))

    for stream in streams:
        day = _day_of(stream.origin)
        if day is None:
            yield Refusal("no date in the name", stream.origin)
            continue
        content = None
        try:
            head, opened = peek_head(stream.file, 1 << 16)
            if is_binary(head):
                raise NotTextError("binary content")
            if stream.path is None:
                content = read_all(opened, MAX_DAY_BYTES)
        except DAMAGE as error:
            yield damage_refusal(stream.origin, error)
            continue
        channel = _channel_of(stream.origin, head)
        held_bytes += len(content or b"")
        opened.close()
        year, week, _ = day.isocalendar()
        key = (channel, f"{year}-W{week:02d}")
        held.setdefault(key, []).append((day.isoformat(), stream.origin, stream.path, content))
        held.move_to_end(key)
        while held_bytes > MAX_HELD_BYTES or len(held) > MAX_HELD_WEEKS:
            yield let_go()
    while held:
        yield let_go()


def _documents(piece: Piece) -> Iterator[Found]:
    """Yield one week of one channel."""
    channel, week, days = piece.extra
    parts: list[str] = []
    origins: list[str] = []
    for day, origin, path, content in days:
        try:
            raw = content if content is not None else Piece(origin, path=path).read(MAX_DAY_BYTES)
        except DAMAGE as error:
            yield damage_refusal(origin, error)
            continue
        lines = day_lines(raw)
        if lines is None:
            yield Refusal("no messages", origin)
            continue
        parts.append("\n".join([f"{channel} {day}".strip(), *lines]))
        origins.append(origin)
    if parts:
        meta: dict[str, Any] = {"origin": origins[0], "origins": origins, "week": week}
        if channel:
            meta["channel"] = channel
        yield Document("\n\n".join(parts), meta=meta)


def day_lines(raw: bytes) -> list[str] | None:
    """Return the messages of a day, or `None` where only the server wrote."""
    lines: list[str] = []
    spoken = False
    for encoded in raw.split(b"\n"):
        # Each line is in the encoding of its writer's program.
        try:
            line = encoded.decode("utf-8")
        except UnicodeDecodeError:
            line = encoded.decode("cp1252", "replace")
        line = _COLOURS.sub("", line).rstrip()
        if line.startswith("==="):
            if not any(noise in line for noise in _NOISE) and (message := line[3:].strip()):
                lines.append(f"* {message}")
        elif line and (message := _STAMP.sub("", line, count=1).strip() if line[0] == "[" else line):
            lines.append(message)
            spoken = True
    return lines if spoken else None


def _day_of(origin: str) -> date | None:
    for found in reversed(list(_DATE.finditer(unquote(origin)))):
        try:
            return date(*map(int, found.groups()))
        except ValueError:
            continue
    return None


def _channel_of(origin: str, head: bytes) -> str:
    for part in reversed(unquote(origin).replace("!", "/").split("/")):
        if (found := _CHANNEL.search(part)) is not None:
            return re.sub(r"\.(?:txt|log|raw|gz|bz2)+$", "", found.group())
    inside = _CHANNEL_INSIDE.search(head)
    return inside.group(1).decode("utf-8", "replace") if inside else ""


SOURCE = Source(
    slug="ubuntu-irc",
    name="Ubuntu IRC",
    title="logs of the Ubuntu channels on Freenode",
    raw_format="daily text logs of irclogs.ubuntu.com (2007/01/11/#ubuntu.txt), in folders or archives",
    licence="public-domain",
    consent="author",
    treatment=(
        "Days on which only the server spoke are refused. Lines about joining, leaving, topics and new names are "
        "dropped; other messages of the server start with `* `; times are cut off. Each day starts with the "
        "channel and its date. A document is one channel and one ISO week of one year: the original's key lacked "
        "the year, so that week 12 of all years shared one document of half a megabyte. Channel and date come "
        "from the path; a log that does not name its channel there is asked for it in its own lines."
    ),
    citation="https://irclogs.ubuntu.com; The Pile, arXiv:2101.00027, section 2.15",
    wants=ends_with(".txt", ".log"),
    pieces=_pieces,
    documents=_documents,
)
