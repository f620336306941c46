"""A compression bomb is rejected with one reason, in any packing and by any source, before much of it is unpacked."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator

import pytest
import zstandard

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.raw import limits
from piledriver.corpus.raw.gzip import GzipReader
from tests.corpus.fuzz.law import hold
from tests.corpus.fuzz.seeds import seven_zipped, tarred, zipped

SIZE = 8 << 20
# Lines, so that a source of lines reads on.
CONTENT = b'{"x": "' + b" " * 1000 + b'"}\n'
PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstandard.compress,
}
# A name and a first line for each way of reading compressed files.
INPUTS = {
    "text": ("a.txt", b""),
    "html": ("a.html", b""),
    "jsonl": ("a.jsonl", b""),
    "hackernews": ("items.jsonl", b""),
    "freelaw": ("opinions.jsonl", b""),
    "nih-exporter": ("a.csv", b"APPLICATION_ID,ABSTRACT_TEXT\n"),
    "mail": ("a.csv", b"file,message\n"),
    "pubmed-abstracts": ("a.xml", b"<PubmedArticleSet>"),
    "philpapers": ("a.xml", b"<OAI-PMH>"),
    "wikipedia-en": ("enwiki-pages-articles.xml", b"<mediawiki><page>"),
    "stackexchange": ("Posts.xml", b"<posts>"),
    "uspto-backgrounds": ("a.xml", b"<?xml "),
    "openwebtext2": ("a.html", b""),
    "pile-cc": ("a.warc", b"WARC/1.0\r\nWARC-Type: response\r\nContent-Length: 90000000\r\n\r\n"),
    "europarl": ("ep-00-01-17.txt", b""),
    "ubuntu-irc": ("2004/07/05/#ubuntu.txt", b""),
    "youtubesubtitles": ("v.en.vtt", b"WEBVTT\n"),
    "dm-mathematics": ("train-easy/a__b.txt", b""),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "EXPANSION_GRACE_BYTES", 1 << 20)
    monkeypatch.setattr(limits, "MAX_EXPANSION", 50)


@pytest.fixture(scope="module")
def bomb() -> bytes:
    return CONTENT * (SIZE // len(CONTENT))


def reasons(slug: str, name: str, content: bytes) -> set[str]:
    return {item.reason for item in hold(slug, {name: content}) if isinstance(item, Refusal)}


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("slug", INPUTS)
def test_a_compressed_file_has_one_reason(slug: str, packing: str, bomb: bytes) -> None:
    name, start = INPUTS[slug]
    # A record of a web archive may be as large as a page.
    content = start + bomb * (3 if slug == "pile-cc" else 1)
    found = reasons(slug, f"{name}.{packing}", PACKINGS[packing](content))
    assert "compression bomb" in found
    assert not [reason for reason in found if reason.startswith(("damaged", "timed", "malformed"))]


@pytest.mark.parametrize("archive", ["a.tar.gz", "a.tar.bz2", "a.tar.xz", "a.tar.zst", "a.zip", "a.7z"])
def test_a_member_of_an_archive_has_the_same(archive: str, bomb: bytes) -> None:
    if archive == "a.zip":
        content = zipped(**{"a.txt": bomb})
    elif archive == "a.7z":
        content = seven_zipped({"a.txt": bomb})
    else:
        content = PACKINGS[archive.rpartition(".")[2]](tarred({"a.txt": bomb}))
    assert reasons("text", archive, content) == {"compression bomb"}


@pytest.mark.parametrize("archive", ["a.zip", "a.7z", "a.tar", "nested.zip"])
def test_many_small_members_are_summed(archive: str, bomb: bytes) -> None:
    """Each member is below the limit; together they are a bomb, and the rest of the archive is not unpacked."""
    part = bomb[: 1 << 19]
    names = [f"{number}.txt" for number in range(16)]
    if archive == "a.zip":
        content = zipped(**dict.fromkeys(names, part))
    elif archive == "a.7z":
        content = seven_zipped(dict.fromkeys(names, part))
    elif archive == "a.tar":
        content = tarred({f"{name}.gz": gzip.compress(part) for name in names})
    else:
        content = zipped(**{f"{name}.zip": zipped(**{name: part}) for name in names})
    found = hold("text", {archive: content})
    refused = [item for item in found if isinstance(item, Refusal)]
    assert [item.reason for item in refused] == ["compression bomb"]
    assert "in all members together" in str(refused[0].detail)
    assert 0 < len(found) - len(refused) < 6


def test_a_bomb_is_not_unpacked_before_its_reason_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    squeeze = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = b"".join(squeeze.compress(bytes(1 << 24)) for _ in range(24)) + squeeze.flush()
    read = 0

    def counted(self: GzipReader, size: int, real: Callable[[GzipReader, int], bytes] = GzipReader.read1) -> bytes:
        nonlocal read
        content = real(self, size)
        read += len(content)
        return content

    monkeypatch.setattr(GzipReader, "read1", counted)
    assert reasons("jsonl", "a.jsonl.gz", packed) == {"line too long", "compression bomb"}
    assert read < 1 << 28


def records(*bodies: bytes) -> Iterator[bytes]:
    for number, body in enumerate(bodies):
        head = f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a.example/{number}\r\n"
        block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + body
        yield f"{head}Content-Length: {len(block)}\r\n\r\n".encode() + block + b"\r\n\r\n"


def test_a_bomb_among_the_records_of_a_web_archive_is_not_unpacked() -> None:
    page = b"<p>The river rises in the spring, falls in the summer, and the people of the town know it well.</p>" * 3
    content = b"".join(gzip.compress(record) for record in records(page, page + bytes(60 << 20), page))
    found = hold("pile-cc", {"a.warc.gz": content})
    assert [item.reason for item in found if isinstance(item, Refusal)] == ["too large"]
    assert len([item for item in found if isinstance(item, Document)]) == 2
