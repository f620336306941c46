from __future__ import annotations

import bz2
import gzip
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.corpus.sources.shared import warc as web_archive
from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths

PROSE = "This is a sentence of the article, and it has a clause. Here is another one, which makes it prose. " * 4
PAGE = f"<html><head><title>T &amp; U</title></head><body><article><p>{PROSE}</p></article></body></html>"


OK = "HTTP/1.1 200 OK\r\nContent-Type: text/html"


def record(
    body: bytes, kind: str = "response", http: str = OK, media: str = "application/http; msgtype=response"
) -> bytes:
    block = f"{http}\r\n\r\n".encode() + body if kind == "response" else body
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: http://a.example/\r\nWARC-Date: 2020-01-01T00:00:00Z\r\n"
    return f"{head}Content-Type: {media}\r\nContent-Length: {len(block)}\r\n\r\n".encode() + block + b"\r\n\r\n"


def test_a_response_becomes_its_main_content() -> None:
    documents, refusals = extract_bytes("pile-cc", "a.warc", record(PAGE.encode()))
    assert not refusals
    assert documents[0].text == PROSE.strip()
    assert documents[0].meta["url"] == "http://a.example/"
    assert documents[0].meta["title"] == "T & U"
    assert documents[0].meta["language"] == "en"


def test_what_is_no_english_page_says_why() -> None:
    french = (
        "<p>"
        + "Voici une phrase de l'article, et elle a une proposition. En voici une autre, qui en fait de la prose. " * 4
    )
    content = b"".join(
        [
            record(french.encode()),
            record(b"%PDF", http="HTTP/1.1 200 OK\r\nContent-Type: application/pdf"),
            record(PAGE.encode(), http="HTTP/1.1 404 Not Found\r\nContent-Type: text/html"),
            record(b"<p></p>"),
            record(PAGE.encode(), kind="request"),
        ]
    )
    documents, refusals = extract_bytes("pile-cc", "a.warc", content)
    assert not documents
    assert [refusal.reason for refusal in refusals] == ["not english", "not html", "http status is not 2xx", "no text"]


def test_the_encoding_is_the_servers_then_the_pages() -> None:
    text = PROSE + "naïve café"
    server = record(
        f"<p>{text}</p>".encode("utf-16-le"), http="HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-16-le"
    )
    page = record(f"<meta charset=iso-8859-1><p>{text}</p>".encode("latin-1"))
    documents, _ = extract_bytes("pile-cc", "a.warc", server + page)
    assert [document.text[-10:] for document in documents] == ["naïve café"] * 2


def test_a_response_that_does_not_say_it_is_http() -> None:
    documents, _ = extract_bytes("pile-cc", "a.warc", record(PAGE.encode(), media="text/html"))
    assert documents[0].text == PROSE.strip()


def test_wet_text_is_kept_as_it_is() -> None:
    content = record(f"Title\n{PROSE}".encode(), kind="conversion", media="text/plain")
    documents, _ = extract_bytes("pile-cc", "a.warc.wet.gz", gzip.compress(content))
    assert documents[0].text.startswith("Title\nThis is")


def test_chunked_and_compressed_answers_are_decoded() -> None:
    packed = gzip.compress(PAGE.encode())
    chunked = b"".join(
        b"%x\r\n%s\r\n" % (len(packed[i : i + 99]), packed[i : i + 99]) for i in range(0, len(packed), 99)
    )
    http = "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\nContent-Encoding: gzip"
    documents, _ = extract_bytes("pile-cc", "a.warc", record(chunked + b"0\r\n\r\n", http=http))
    assert documents[0].text == PROSE.strip()


def test_arc_records_with_spaces_in_their_address() -> None:
    http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + PAGE.encode()
    version = b"1 0 X\nURL IP-address Archive-date Content-type Archive-length\n"
    head = b"filedesc://a.arc 0.0.0.0 20140216050221 text/plain %d\n%s\n" % (len(version), version)
    content = head + b"http://a.example/x y 1.2.3.4 20140216050221 text/html %d\n%s\n" % (len(http), http)
    documents, _ = extract_bytes("pile-cc", "a.arc.gz", gzip.compress(content))
    assert documents[0].meta["url"] == "http://a.example/x y"
    assert documents[0].meta["date"] == "2014-02-16T05:02:21Z"


def test_ccnet_lines() -> None:
    lines = (
        b'{"raw_content": "Hello there.", "language": "en"}\n{"text": "Salut", "meta": {"language": "fr"}}\nnot json\n'
    )
    documents, refusals = extract_bytes("pile-cc", "en_head.json.gz", gzip.compress(lines))
    assert [document.text for document in documents] == ["Hello there."]
    assert [refusal.reason for refusal in refusals] == ["not english", "invalid json"]


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "records compressed"])
def test_a_file_cut_anywhere_gives_every_record_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pack: object
) -> None:
    pages = [PAGE.replace("sentence", f"sentence number {number}") for number in range(40)]
    path = tmp_path / ("a.warc" if pack is bytes else "a.warc.gz")
    path.write_bytes(b"".join(pack(record(page.encode())) for page in pages))  # type: ignore[operator]
    expected, _ = extract_paths("pile-cc", path)
    assert len(expected) == 40
    for size in (97, 1000, 5000):
        monkeypatch.setattr(web_archive, "PIECE_BYTES", size)
        assert extract_paths("pile-cc", path)[0] == expected


@pytest.mark.parametrize(("suffix", "pack"), [(".bz2", bz2.compress), (".zst", zstandard.compress)])
def test_other_compressions(suffix: str, pack: Callable[[bytes], bytes]) -> None:
    documents, _ = extract_bytes("pile-cc", f"a.warc{suffix}", pack(record(PAGE.encode()) * 3))
    assert len(documents) == 3


def test_an_archive_in_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("b/a.warc.gz", gzip.compress(record(PAGE.encode())))
    documents, _ = extract_paths("pile-cc", path)
    assert documents[0].meta["origin"] == "a.zip!b/a.warc.gz#0 http://a.example/"


def test_one_compressed_stream_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_archive, "PIECE_BYTES", 100)
    documents, _ = extract_bytes("pile-cc", "a.warc.gz", gzip.compress(record(PAGE.encode()) * 5))
    assert len(documents) == 5


def test_a_damaged_record_costs_itself() -> None:
    pages = [gzip.compress(record(PAGE.replace("sentence", f"number {n}").encode())) for n in range(5)]
    broken = bytearray(pages[2])
    broken[len(broken) // 2] ^= 0xFF
    documents, refusals = extract_bytes("pile-cc", "a.warc.gz", b"".join([*pages[:2], bytes(broken), *pages[3:]]))
    assert {d.text[10:18] for d in documents} >= {"number 0", "number 1", "number 3", "number 4"}
    assert len(documents) + len(refusals) == 5


@pytest.mark.skipif(not (SAMPLES / "pile-cc").exists(), reason="no raw samples here")
def test_samples() -> None:
    documents, refusals = extract_paths("pile-cc", SAMPLES / "pile-cc")
    assert len(documents) >= 39
    assert all("<div" not in document.text for document in documents)
    lineage = next(document for document in documents if "lineage" in document.meta.get("url", ""))
    assert "| 1 | Nazli Goharian |" in lineage.text
    reasons = {"not english", "bad record length", "not html", "no text", "not a page"}
    assert {refusal.reason for refusal in refusals} <= reasons


VALID = gzip.compress(record(PAGE.encode())) * 2


@settings(max_examples=40, deadline=None)
@given(
    st.binary(max_size=200),
    st.integers(0, len(VALID)),
    st.sampled_from(["a.warc.gz", "a.warc", "a.arc", "a.jsonl", "a.html"]),
)
def test_any_bytes_end_in_documents_or_refusals(noise: bytes, at: int, name: str) -> None:
    extract_bytes("pile-cc", name, noise)
    extract_bytes("pile-cc", name, VALID[:at] + noise + VALID[at:])
    extract_bytes("pile-cc", name, record(PAGE.encode())[:at] + noise)


def test_compressed_bodies_are_unpacked_and_the_next_record_is_found() -> None:
    import zlib

    import brotli

    body = PAGE.encode()
    packed = gzip.compress(body)
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (packed[:50], packed[50:])) + b"0\r\n\r\n"
    answers = [
        record(chunks, http=f"{OK}\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked"),
        record(zlib.compress(body), http=f"{OK}\r\nContent-Encoding: deflate"),
        record(zlib.compress(body)[2:-4], http=f"{OK}\r\nContent-Encoding: deflate"),
        record(brotli.compress(body), http=f"{OK}\r\nContent-Encoding: br"),
        record(zstandard.compress(body), http=f"{OK}\r\nContent-Encoding: zstd"),
        record(body, http=f"{OK}\r\nContent-Encoding: gzip"),
    ]
    for archive in (b"".join(answers), b"".join(map(gzip.compress, answers))):
        documents, refusals = extract_bytes("pile-cc", "a.warc", archive)
        assert [document.text for document in documents] == [PROSE.strip()] * len(answers)
        assert not refusals


def test_bodies_that_are_not_in_chunks_though_the_server_said_so() -> None:
    # Common Crawl before 2018 kept the server's header and wrote the body unpacked.
    said = f"{OK}\r\nTransfer-Encoding: chunked\r\nContent-Encoding: gzip"
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(PAGE), PAGE.encode())
    packed = gzip.compress(PAGE.encode())
    bodies = [PAGE.encode(), chunked, b"%x\r\n%s\r\n0\r\n\r\n" % (len(packed), packed), packed]
    documents, refusals = extract_bytes("pile-cc", "a.warc", b"".join(record(body, http=said) for body in bodies))
    assert [document.text for document in documents] == [PROSE.strip()] * 4
    assert refusals == []


@pytest.mark.parametrize("kind", ["warcinfo", "metadata", "resource", "request"])
@pytest.mark.parametrize("slug", ["pile-cc", "openwebtext2"])
def test_records_that_are_not_pages_are_no_documents(slug: str, kind: str) -> None:
    log = record(PROSE.encode(), kind=kind, media="text/plain")
    page = record(PAGE.encode(), kind="resource", media="text/html; charset=utf-8")
    documents, refusals = extract_bytes(slug, "a.warc", log + page)
    assert [document.text for document in documents] == [PROSE.strip()]
    assert [refusal.reason for refusal in refusals] == (["not a page"] if kind == "resource" else [])
