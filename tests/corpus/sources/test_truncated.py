"""A file that ends too early: whatever stood wholly before the cut is delivered, unchanged, and the cut is said.

Every record holds words of its own, made at random so that compression does not squeeze many into one byte.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import zlib
from collections.abc import Callable

import pytest
import zstandard

from tests.corpus.sources.extracting import extract_bytes

RECORDS = 40
_luck = random.Random(7)


def words(number: int) -> str:
    """English enough to be taken for it, with a name that no other record has."""
    letters = "".join(_luck.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=1500))
    return f"mark{number:03d} The people of this town have always been of the opinion that {letters} ended{number:03d}"


TEXTS = [words(number) for number in range(RECORDS)]


def lines(row: Callable[[int, str], dict[str, object]]) -> list[bytes]:
    return [json.dumps(row(number, text)).encode() + b"\n" for number, text in enumerate(TEXTS)]


def between(head: bytes, records: list[bytes], tail: bytes) -> list[bytes]:
    return [head + records[0], *records[1:-1], records[-1] + tail]


def post(number: int, text: str) -> bytes:
    question = f'<row Id="{2 * number + 1}" PostTypeId="1" Score="5" Title="t" Body="&lt;p&gt;{text}&lt;/p&gt;" />\n'
    answer = f'<row Id="{2 * number + 2}" PostTypeId="2" ParentId="{2 * number + 1}" Score="9" Body="yes" />\n'
    return (question + answer).encode()


def hacker_news(number: int, text: str) -> dict[str, object]:
    reply = {"id": 10 * number + 2, "type": "comment", "author": "b", "text": "No."}
    story = {"id": 10 * number + 1, "type": "story", "author": "a", "title": "T", "points": 9}
    return {**story, "text": text, "children": [reply]}


def article(number: int, text: str) -> bytes:
    cited = f"<MedlineCitation><PMID>{number + 1}</PMID><Article><ArticleTitle>T</ArticleTitle>"
    said = f"<Abstract><AbstractText>{text}</AbstractText></Abstract>"
    return f"<PubmedArticle>{cited}{said}</Article></MedlineCitation></PubmedArticle>".encode()


def page(number: int, text: str) -> bytes:
    revision = f"<revision><id>1</id><text>{text}</text></revision>"
    return f"<page><title>T{number}</title><ns>0</ns><id>{number}</id>{revision}</page>\n".encode()


def record(number: int, text: str) -> bytes:
    said = f"<dc:title>T</dc:title><dc:description>{text}</dc:description>"
    inside = f"<oai_dc:dc xmlns:oai_dc='o' xmlns:dc='d'>{said}</oai_dc:dc>"
    return f"<record><header><identifier>{number}</identifier></header><metadata>{inside}</metadata></record>".encode()


def letter(number: int, text: str) -> bytes:
    return f"From a@b Mon Jan  1 00:00:{number:02d} 2001\nFrom: a@b\nSubject: s\n\n{text}\n\n".encode()


def patent(number: int, text: str) -> bytes:
    return (
        f'<?xml version="1.0"?>\n<us-patent-grant><us-bibliographic-data-grant><publication-reference><document-id>'
        f"<doc-number>{number}</doc-number></document-id></publication-reference></us-bibliographic-data-grant>"
        f"<description><heading>BACKGROUND</heading><p>{text}</p></description></us-patent-grant>\n"
    ).encode()


STREAMS = {
    ("jsonl", "a.jsonl"): lines(lambda number, text: {"text": text}),
    ("stackexchange", "Posts.xml"): between(b"<posts>\n", [post(*item) for item in enumerate(TEXTS)], b"</posts>"),
    ("hackernews", "a.jsonl"): lines(hacker_news),
    ("pubmed-abstracts", "a.xml"): between(b"<S>", [article(*item) for item in enumerate(TEXTS)], b"</S>"),
    ("wikipedia-en", "a-pages.xml"): between(
        b"<mediawiki>", [page(*item) for item in enumerate(TEXTS)], b"</mediawiki>"
    ),
    ("philpapers", "a.xml"): between(b"<OAI>", [record(*item) for item in enumerate(TEXTS)], b"</OAI>"),
    ("mail", "a.mbox"): [letter(*item) for item in enumerate(TEXTS)],
    ("enron-emails", "a.csv"): [
        b'"file","message"\n' * (number == 0) + f'"{number}","Subject: s\n\n{text}"\n'.encode()
        for number, text in enumerate(TEXTS)
    ],
    ("nih-exporter", "PRJABS.csv"): [
        b"APPLICATION_ID,ABSTRACT_TEXT\n" * (number == 0) + f'{number + 1},"{text}"\n'.encode()
        for number, text in enumerate(TEXTS)
    ],
    ("uspto-backgrounds", "ipg.xml"): [patent(*item) for item in enumerate(TEXTS)],
    ("freelaw", "opinions.jsonl"): lines(lambda number, text: {"id": number, "plain_text": text}),
}
MEMBERS = {
    "text": (".txt", lambda number, text: text),
    "html": (".html", lambda number, text: f"<p>{text}</p>"),
    "markdown": (".md", lambda number, text: text),
    "freelaw": (".json", lambda number, text: json.dumps({"id": number, "plain_text": text})),
    "pubmed-central": (".nxml", lambda number, text: f"<article><body><p>{text}</p></body></article>"),
    "opensubtitles": (".xml", lambda number, text: f"<document><s>{text}</s></document>"),
    "europarl": (".txt", lambda number, text: f"<SPEAKER ID=1 NAME=A>\n{text}\n"),
    "youtubesubtitles": (".srt", lambda number, text: f"1\n00:00:01,000 --> 00:00:02,000\n{text}\n"),
    "ubuntu-irc": (".txt", lambda number, text: f"[00:00] <a> {text}\n"),
    "enron-emails": (".eml", lambda number, text: f"Subject: s\n\n{text}\n"),
    "gutenberg-pg-19": (".txt", lambda number, text: text),
    "github": (
        ".py",
        lambda number, text: "x = 1\n" + "\n".join(f"# {text[i : i + 60]}" for i in range(0, len(text), 60)),
    ),
    "arxiv": (
        ".tex",
        lambda number, text: f"\\documentclass{{article}}\\begin{{document}}{text}\\end{{document}}",
    ),
}
PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}


def readable(packed: bytes, kind: str) -> bytes:
    """As much as can be unpacked of a file that was cut."""
    unpack = {".gz": lambda: zlib.decompressobj(31), ".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor}
    if kind == ".zst":
        reader = zstandard.ZstdDecompressor().stream_reader(packed)
        found = b""
        while block := reader.read(1 << 16):
            found += block
        return found
    return unpack[kind]().decompress(packed)


def marks(text: str) -> set[str]:
    """Which records a text holds to their end."""
    return {f"{number:03d}" for number in range(RECORDS) if f"ended{number:03d}" in text}


def begun(text: str) -> set[str]:
    return {f"{number:03d}" for number in range(RECORDS) if f"mark{number:03d}" in text}


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(("slug", "name"), STREAMS)
def test_records_before_a_cut_are_delivered(slug: str, name: str, kind: str) -> None:
    packed = PACKED[kind](b"".join(STREAMS[slug, name]))
    for share in (0.15, 0.5, 0.95):
        cut = packed[: int(share * len(packed))]
        whole = readable(cut, kind)
        there = 0
        size = 0
        for content in STREAMS[slug, name]:
            size += len(content)
            there += size <= len(whole)
        documents, refusals = extract_bytes(slug, name + kind, cut) if whole else ([], ["nothing to read"])
        found = "\n".join(document.text for document in documents)
        # The last one may be held back: in some formats only what follows shows that it is whole.
        assert {f"{number:03d}" for number in range(there - 1)} <= marks(found)
        assert begun(found) == marks(found), "a record was delivered in part"
        assert refusals
        assert all(r.reason and r.origin for r in refusals if not isinstance(r, str))


@pytest.mark.parametrize("slug", MEMBERS)
def test_members_before_a_cut_are_delivered(slug: str) -> None:
    archive = io.BytesIO()
    ends: list[int] = []
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for number, text in enumerate(TEXTS):
            name, raw = member(slug, number, text)
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
            ends.append(archive.tell())
    plain = archive.getvalue()
    # A tar.gz is one submission to arXiv; its bulk files are not compressed.
    forms = [(plain, "a.tar", ""), (gzip.compress(plain), "a.tar.gz", ".gz")][: 1 if slug == "arxiv" else 2]
    for packed, name, kind in forms:
        for share in (0.1, 0.52, 0.9):
            # Not between two members, where an archive that was cut looks like one that ends.
            cut = packed[: int(share * len(packed)) // 512 * 512 + 100]
            there = len(readable(cut, kind) if kind else cut)
            documents, refusals = extract_bytes(slug, name, cut)
            found = "\n".join(document.text for document in documents)
            whole = {f"{number:03d}" for number, end in enumerate(ends) if end <= there}
            assert whole <= marks(found)
            assert begun(found) == marks(found), "a member was delivered in part"
            assert refusals or there >= ends[-1]


def member(slug: str, number: int, text: str) -> tuple[str, bytes]:
    """The name and the content of one member of an archive."""
    ending, content = MEMBERS[slug]
    raw = content(number, text).encode()
    if slug == "ubuntu-irc":
        return f"2007/01/{number % 28 + 1:02d}/#a{number}{ending}", raw
    if slug == "arxiv":
        return f"2001/2001.{number:05d}.gz", gzip.compress(raw)
    return f"folder{number:03d}/ep-01-01-{number + 10}{ending}", raw
