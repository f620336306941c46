"""What every source must survive: damaged, wrongly encoded, huge and hostile files.

Nothing is raised, nothing takes long, what is refused says why, and nothing is written beside the input.
"""

from __future__ import annotations

import gzip
import io
import os
import signal
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.extraction import extract_files
from piledriver.corpus.sources import SOURCES
from piledriver.corpus.sources.table import BUILT_IN

# A name that each source takes for its raw data.
NAMES = {
    "pile-cc": "CC-MAIN-0.warc",
    "pubmed-central": "PMC1.nxml",
    "books3": "book.epub",
    "openwebtext2": "page.html",
    "arxiv": "paper.tex",
    "github": "main.py",
    "freelaw": "opinion.json",
    "stackexchange": "Posts.xml",
    "uspto-backgrounds": "ipg140107.xml",
    "pubmed-abstracts": "pubmed24n0001.xml",
    "gutenberg-pg-19": "2701.txt",
    "opensubtitles": "1.xml",
    "wikipedia-en": "enwiki-pages-articles.xml",
    "dm-mathematics": "algebra__linear_1d.txt",
    "ubuntu-irc": "2004/07/05/#ubuntu.txt",
    "bookcorpus2": "book.epub",
    "europarl": "ep-00-01-17.txt",
    "hackernews": "items.json",
    "youtubesubtitles": "video.en.vtt",
    "philpapers": "records.xml",
    "nih-exporter": "RePORTER_PRJABS_C_FY2020.csv",
    "enron-emails": "maildir/allen-p/inbox/1.",
    "text": "a.txt",
    "jsonl": "a.jsonl",
    "parquet": "a.parquet",
    "html": "a.html",
    "markdown": "a.md",
    "code": "a.py",
    "epub": "a.epub",
    "pdf": "a.pdf",
    "mail": "a.eml",
}
SECONDS = 30
DEEP = 100_000
MARKUP = b"<p>Some words of a paragraph, with a full stop.</p>\n"


def _truncated_gzip() -> bytes:
    content = gzip.compress(b"".join(str(number).encode() for number in range(20_000)))
    return content[: len(content) // 2]


def _laughs() -> bytes:
    entities = b"".join(b'<!ENTITY l%d "%s">' % (n, b"&l%d;" % (n - 1) * 10) for n in range(1, 10))
    return (
        b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY l0 "ha">' + entities + b']><posts><row Id="1" PostTypeId="1" '
        b'Body="&l9;"/><article><body><p>&l9;</p></body></article><page><title>&l9;</title></page></posts>'
    )


def _nested(opening: bytes, closing: bytes) -> bytes:
    return opening * DEEP + b"deep" + closing * DEEP


def _climbing_zip() -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        for name in ("../climbed.txt", "../../climbed.xml", "/climbed.html", "a/../../climbed.json", "..\\climbed.md"):
            archive.writestr(name, MARKUP)
        link = zipfile.ZipInfo("link.txt")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    return target.getvalue()


HOSTILE: dict[str, Callable[[], bytes]] = {
    "empty": bytes,
    "truncated gzip": _truncated_gzip,
    "wrong encoding": lambda: bytes(range(256)) * 40 + b"\xff\xfe\xd8\x00" + MARKUP + b"\xc3\x28\xed\xa0\x80\n" * 50,
    "one line": lambda: b"word, " * (20_000_000 // 6),
    "one line of tags": lambda: b"<p>" + b"<b " * (2_000_000 // 3),
    "billion laughs": _laughs,
    "deep elements": lambda: b"<html><body>" + _nested(b"<div>", b"</div>"),
    "deep lists": lambda: _nested(b"<ul><li>", b"</li></ul>"),
    "deep quotations": lambda: _nested(b"<blockquote>a", b"</blockquote>"),
    "deep sections": lambda: b"<article><body>" + _nested(b"<sec>", b"</sec>") + b"</body></article>",
    "deep json": lambda: b'{"text": ' + _nested(b"[", b"]") + b"}",
    "deep braces": lambda: b"\\documentclass{article}\\begin{document}" + _nested(b"{\\bf ", b"}"),
    "deep environments": lambda: _nested(b"\\begin{quote}", b"\\end{quote}"),
    "deep templates": lambda: b"'''A''' is a word.\n\n" + _nested(b"{{a|", b"}}"),
    "deep links": lambda: _nested(b"[[a|", b"]]"),
    "deep quoting": lambda: b"From: a@example.com\n\n" + _nested(b"> ", b"\n"),
    "climbing zip": _climbing_zip,
}


@pytest.fixture(autouse=True)
def hurried() -> Iterator[None]:
    def too_long(*_: object) -> None:
        raise AssertionError(f"more than {SECONDS} s")

    # Time of this process, not of the clock on the wall: other processes may keep the machine busy.
    previous = signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, previous)


def test_every_source_is_tried() -> None:
    assert list(NAMES) == list(BUILT_IN)
    assert all(SOURCES[slug].wants(Path(name).name) for slug, name in NAMES.items())


@pytest.mark.parametrize("slug", NAMES)
def test_hostile_files(slug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.chdir(scratch)
    for number, (kind, content) in enumerate(HOSTILE.items()):
        folder = tmp_path / "raw" / str(number)
        name = f"{NAMES[slug]}.gz" if kind == "truncated gzip" else "archive.zip" if "zip" in kind else NAMES[slug]
        path = folder / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content())
        before = sorted(tmp_path.rglob("*"))
        for found in extract_files(SOURCES[slug], [str(path if "zip" in kind else folder)]):
            assert isinstance(found, Document | Refusal), kind
            if isinstance(found, Refusal):
                assert found.reason not in ("", "parser failed"), (kind, found)
                assert found.origin, (kind, found)
            else:
                assert "root:" not in found.text, kind
                assert len(found.text) < 100_000_000, kind
        assert sorted(tmp_path.rglob("*")) == before, kind
        os.remove(path)


GOOD = {
    "text": ("z.txt", b"A line of text."),
    "youtubesubtitles": ("z.en.srt", b"1\n00:00:01,000 --> 00:00:02,000\nHello there.\n"),
    "mail": ("z.eml", b"From: a@example.com\nSubject: s\n\nHello there.\n"),
    "hackernews": (
        "z.jsonl",
        b'{"id":1,"type":"story","title":"T"}\n{"id":2,"type":"comment","parent":1,"text":"c"}\n',
    ),
}


@pytest.mark.parametrize("slug", GOOD)
def test_a_damaged_file_costs_only_itself(slug: str, tmp_path: Path) -> None:
    name, content = GOOD[slug]
    (tmp_path / name).write_bytes(content)
    (tmp_path / f"a{name[1:]}.gz").write_bytes(_truncated_gzip())
    found = list(extract_files(SOURCES[slug], [str(tmp_path)]))
    assert [item.reason for item in found if isinstance(item, Refusal)] == ["damaged data"]
    assert [item.meta["origin"] for item in found if isinstance(item, Document)]
