"""StackExchange: questions with their best answers."""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterator
from functools import partial

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.html.convert import fragment_bytes_to_text
from piledriver.corpus.formats.html.fast.convert import compile_scanner
from piledriver.corpus.formats.xml.unescape import compile_unescape
from piledriver.corpus.raw.streams import RawStream, bare_name
from piledriver.corpus.sources.base import Documents, Found, Piece, Source, group_by_size, per_file, stop_at_damage
from piledriver.corpus.sources.stackexchange.rows import PostThreads, attribute, field, numbers, read_rows

MIN_SCORE = 3
MOST_ANSWERS = 3
_PIECE_BYTES = 1 << 19
_QUESTION, _ANSWER = 1, 2
_TAG_MARKS = re.compile(r"[<>|]+")
_POSTS = re.compile(r"(?:(.+)[-._])?posts\.xml")
# Attributes by their names as they stand in a row.
_SCORE, _DATE, _BODY, _USER, _USER_NAME, _TITLE, _TAGS, _LICENCE = (
    f' {name}="'.encode()
    for name in str.split("Score CreationDate Body OwnerUserId OwnerDisplayName Title Tags ContentLicense")
)
_VERSION = re.compile(r"CC[ -]BY-SA[ -](\d\.\d)", re.IGNORECASE)
# The hosts of the network; any other name of a folder is no address.
_SITE = re.compile(
    r"(?:[a-z0-9-]+\.){1,2}stackexchange\.com|(?:[a-z]{2,4}\.){0,2}stackoverflow\.com|(?:meta\.)?(?:superuser\.com"
    r"|serverfault\.com|askubuntu\.com|mathoverflow\.net)|stackapps\.com"
)


def _wants(name: str) -> bool:
    """Return whether it is a `Posts.xml`; the other tables of a dump are not needed."""
    return _POSTS.fullmatch(bare_name(name)) is not None


def _split(stream: RawStream) -> Iterator[Piece | Refusal]:
    """Yield whole threads, several to a piece, by the number of the question."""
    site = site_of(stream.origin) or _site_of_folder(stream.path)
    with PostThreads() as threads:
        found = False
        for row in stop_at_damage(stream.origin, read_rows(stream.file, stream.origin)):
            found = True
            if isinstance(row, Refusal):
                yield row
                continue
            number, kind, parent = numbers(row)
            question = parent if kind == _ANSWER else number
            if question is None or number is None or kind is None:
                yield Refusal("row without id", stream.origin, row[:200].decode("utf-8", "replace"))
            elif kind not in (_QUESTION, _ANSWER):
                yield Refusal("neither question nor answer", f"{stream.origin}#{number}", f"post type {kind}")
            else:
                threads.add(question, row.replace(b"\x00", b""))
        if not found:
            yield Refusal("no rows", stream.origin)
        for batch in group_by_size(threads, lambda thread: sum(map(len, thread)), _PIECE_BYTES):
            if not isinstance(batch, Refusal):
                size = sum(len(row) for thread in batch for row in thread)
                yield Piece(stream.origin, length=size, extra=(site, batch))


def site_of(origin: str) -> str:
    """Return the site that a dump is of, by the name of its archive or folder.

    >>> site_of("stackoverflow.com-Posts.7z!Posts.xml"), site_of("dump/french.meta/Posts.xml")
    ('stackoverflow.com', 'french.meta')
    """
    *parts, file = [part for part in re.split(r"[!/\\]", origin) if part != "."]
    if (named := _POSTS.fullmatch(bare_name(file))) and named[1]:
        return file[: len(named[1])]
    if not parts:
        return ""
    name = parts[-1] if not parts[-1].lower().endswith((".tar", ".zip")) or len(parts) == 1 else parts[-2]
    return re.sub(r"(?:-posts)?(?:\.(?:7z|zip|tar|gz|bz2|xz|zst))*$", "", name, flags=re.IGNORECASE)


def _site_of_folder(path: str | None) -> str:
    """Return the name of the folder of a local file, where that is the name of a site."""
    folder = os.path.basename(os.path.dirname(os.path.abspath(path))) if path else ""
    return folder if "." in folder else ""


def _documents(piece: Piece, *, compiled: bool = False) -> Iterator[Found]:
    """Yield each thread of the piece. Rows that will not be used are never parsed."""
    for question, *answers in piece.extra[1]:
        if field(question, b"PostTypeId") == _QUESTION:
            yield _thread(question, answers, piece, compiled)
            continue
        for row in (question, *answers):
            origin = f"{piece.origin}#{field(row, b'Id')}"
            yield Refusal("answer without question", origin, f"question {field(row, b'ParentId')}")


def _thread(row: bytes, answer_rows: list[bytes], piece: Piece, compiled: bool) -> Found:
    number, accepted = field(row, b"Id"), field(row, b"AcceptedAnswerId")
    origin = f"{piece.origin}#{number}"
    if not answer_rows:
        return Refusal("no answers", origin)
    # A negative score is not all digits and reads as none.
    scored = [(field(answer, b"Score") or 0, field(answer, b"Id"), answer) for answer in answer_rows]
    best = [(score, id_, answer) for score, id_, answer in scored if id_ == accepted or score >= MIN_SCORE]
    if not best:
        return Refusal("no accepted or well scored answer", origin)
    best.sort(key=lambda found: (-found[0], found[1] != accepted, found[1] or 0))
    del best[MOST_ANSWERS:]
    used = [row, *(answer for _, _, answer in best)]
    title = " ".join(html.unescape(_value(row, _TITLE)).split())
    markup = (attribute(post, _BODY, compiled=compiled) or b"" for post in used)
    bodies = [fragment_bytes_to_text(body, compiled=compiled) for body in markup]
    parts = [f"Q:\n\n{title}\n\n{bodies[0]}", *(f"A:\n\n{body}" for body in bodies[1:])]
    versions = sorted(set(map(licence_version, used)))
    site: str = piece.extra[0]
    meta = {
        "origin": origin,
        # Share-alike material may be adapted under a later version: the whole is under the latest of its parts.
        "licence": f"CC-BY-SA-{versions[-1]}",
        "site": site or None,
        "question_id": number,
        "answer_ids": [id_ for _, id_, _ in best],
        "title": title,
        "tags": [tag for tag in _TAG_MARKS.split(_value(row, _TAGS)) if tag],
        "score": _score(row),
        "date": _value(row, _DATE) or None,
        "authors": [_value(post, _USER) or _value(post, _USER_NAME) for post in used],
        "url": f"https://{site}/q/{number}" if _SITE.fullmatch(site) else None,
    }
    return Document("\n\n".join(parts) + "\n", meta={name: value for name, value in meta.items() if value is not None})


def _compile() -> Documents:
    """Return `documents` with the compiled readers of posts."""
    compile_scanner()
    compile_unescape()
    return partial(_documents, compiled=True)


def _value(row: bytes, place: bytes) -> str:
    return (attribute(row, place) or b"").decode("utf-8", "replace")


def _score(row: bytes) -> int:
    try:
        return int(attribute(row, _SCORE) or 0)
    except ValueError:
        return 0


def licence_version(row: bytes) -> str:
    """Return the version of CC BY-SA of a post: the one it names, else the one in force when it was written.

    >>> licence_version(b'<row CreationDate="2012-05-01T00:00:00" />')
    '3.0'
    """
    if named := _VERSION.search(_value(row, _LICENCE)):
        return named[1]
    date = _value(row, _DATE)
    return "2.5" if date < "2011-04-08" else "3.0" if date < "2018-05-02" else "4.0"


SOURCE = Source(
    slug="stackexchange",
    name="StackExchange",
    title="questions of the Stack Exchange sites with their best answers",
    raw_format="Posts.xml, or a site's .7z dump (stackoverflow.com-Posts.7z, french.stackexchange.com.7z)",
    licence="CC-BY-SA",
    consent="author",
    treatment=(
        "A question with at least one answer that was accepted or has a score of 3 or more: `Q:`, title, body, then "
        "up to three such answers by score, each after `A:`. Code, lists, tables and formulas of the posts are "
        "kept. Posts may come in any order; questions and answers are joined through files when they do not fit in "
        "memory. The original dropped questions whose number of answers was not reached, here the answers that "
        "there are count. The licence is the version of CC BY-SA that the post names or that was in force when it "
        "was written, the latest where posts differ; authors are named by their user id. Tag wikis and other kinds "
        "of posts are refused."
    ),
    citation="Stack Exchange Inc., Stack Exchange Data Dump, archive.org/details/stackexchange",
    wants=_wants,
    pieces=per_file(_split),
    compile=_compile,
    documents=_documents,
)
