"""HackerNews: stories with the conversations below them."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.html.convert import fragment_to_text
from piledriver.corpus.formats.html.fast.convert import compile_scanner
from piledriver.corpus.raw.streams import RawStream
from piledriver.corpus.sources.base import Documents, Found, Piece, Source, ends_with, group_by_size, stop_at_damage
from piledriver.corpus.sources.hackernews.items import CommentThreads, Item, read_items

_PIECE_BYTES = 1 << 19
# The site cuts long addresses in the text of a link; its `href` has the whole one.
_CUT_LINK = re.compile(r"<a\s[^<>]{0,200}?href=\"([^\"<>]{1,4000})\"[^<>]{0,200}>[^<>]{1,300}\.\.\.</a>")


def _pieces(streams: Iterator[RawStream]) -> Iterator[Piece | Refusal]:
    """Read all items of all files, then yield whole threads, several to a piece."""
    with CommentThreads() as threads:
        for stream in streams:
            for item in stop_at_damage(stream.origin, read_items(stream)):
                if isinstance(item, Refusal):
                    yield item
                else:
                    threads.add(item, f"{stream.origin}#{item['id']}")
        for batch in group_by_size(_threads(threads), len, _PIECE_BYTES):
            yield batch if isinstance(batch, Refusal) else Piece("threads", data=b"\n".join(batch))
        for origin, _, parent in threads.orphans():
            yield Refusal("reply without its story", origin, f"parent {parent}")


def _threads(threads: CommentThreads) -> Iterator[bytes | Refusal]:
    """Yield each story with its replies as JSON."""
    for origin, story in threads.roots():
        reason = _refused(story)
        if reason is not None:
            yield Refusal(reason, origin)
        else:
            replies = threads.replies(story["id"])
            yield msgspec.json.encode({"origin": origin, "story": story, "replies": replies})


def _refused(story: Item) -> str | None:
    if story.get("type") != "story":
        return "not a story"
    if story.get("dead") or story.get("deleted"):
        return "dead or deleted"
    if story.get("score", 1) < 1:
        return "score below 1"
    if story.get("descendants") == 0 or not story.get("title"):
        return "no title" if not story.get("title") else "no comments"
    return None


def _documents(piece: Piece, *, compiled: bool = False) -> Iterator[Found]:
    """Yield each thread of the piece as one document."""
    assert piece.data is not None
    for line in piece.data.split(b"\n"):
        thread = msgspec.json.decode(line)
        yield _document(thread["story"], thread["replies"], thread["origin"], compiled)


def _compile() -> Documents:
    """Return `documents` with the compiled scanner of comments."""
    compile_scanner()
    return partial(_documents, compiled=True)


def _document(story: Item, replies: list[Item], origin: str, compiled: bool) -> Found:
    children: dict[int, list[Item]] = {}
    for reply in replies:
        if not reply.get("dead") and not reply.get("deleted") and reply.get("text"):
            children.setdefault(reply["parent"], []).append(reply)
    conversations = [_conversation(comment, children, compiled) for comment in _ranked(story, children)]
    if not conversations:
        return Refusal("no comments", origin)
    parts = [f"{_line(story['title'])} - {story.get('by', '')}\n"]
    if story.get("url"):
        parts.append(f"\n{story['url']}\n")
    if story.get("text"):
        parts.append(f"\n{_text(story['text'], compiled)}\n")
    parts.append("======\n")
    parts.append("\n------\n".join(conversations))
    time = story.get("time")
    meta: dict[str, Any] = {
        "origin": origin,
        "item_id": story["id"],
        "title": _line(story["title"]),
        "by": story.get("by"),
        "score": story.get("score"),
        "url": story.get("url"),
        "date": datetime.fromtimestamp(time, UTC).isoformat() if time and 0 < time < 1 << 33 else None,
    }
    return Document("".join(parts), meta={name: value for name, value in meta.items() if value is not None})


def _ranked(parent: Item, children: dict[int, list[Item]]) -> list[Item]:
    """Return the replies to an item in the order of the site: by its list of kids, then those not in the list."""
    replies = children.get(parent["id"])
    if not replies:
        return []
    rank = {kid: place for place, kid in enumerate(parent.get("kids") or ())}
    return sorted(replies, key=lambda reply: (rank.get(reply["id"], len(rank)), reply["id"]))


def _conversation(comment: Item, children: dict[int, list[Item]], compiled: bool) -> str:
    """Return the text of a comment, then of its reply with the most replies, and so on down the thread."""
    turns: list[str] = []
    current: Item | None = comment
    seen: set[int] = set()
    while current is not None and current["id"] not in seen:
        seen.add(current["id"])
        turns.append(f"{current.get('by', '')}\n{_text(current['text'], compiled)}\n")
        below = _ranked(current, children)
        current = max(below, key=lambda reply: len(children.get(reply["id"], ())), default=None)
    return "\n~~~\n".join(turns)


def _text(markup: str, compiled: bool) -> str:
    return fragment_to_text(_CUT_LINK.sub(r"\1", markup) if "...</a>" in markup else markup, compiled=compiled)


def _line(title: str) -> str:
    return " ".join(html.unescape(title).split())


SOURCE = Source(
    slug="hackernews",
    name="HackerNews",
    title="Hacker News stories with the conversations below them",
    raw_format="items as JSON: of the Firebase interface, nested as from Algolia, or an export with one item a line",
    licence="unknown",
    consent="terms",
    treatment=(
        "A story that is neither dead nor deleted, with a score of 1 or more and at least one comment: title and "
        "author, address, text, `======`, then for each comment at the top the conversation that begins with it, "
        "`------` between them. A conversation continues with the reply that was itself replied to most, after `~~~`, "
        "as in the original; other replies are left out, because a line of turns cannot show a tree. Items may come "
        "in any order and are joined on disk. Addresses that the site shows cut are whole. Dead and deleted "
        "comments are skipped; replies whose story is not in the input are refused."
    ),
    citation="Y Combinator, Hacker News API, github.com/HackerNews/API",
    wants=ends_with(".json", ".jsonl", ".ndjson"),
    pieces=_pieces,
    compile=_compile,
    documents=_documents,
)
