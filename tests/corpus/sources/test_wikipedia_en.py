"""Wikipedia: dumps in every packing, and which pages are taken."""

from __future__ import annotations

import bz2
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths

HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.10/" xml:lang="en"><siteinfo>
<sitename>Wikipedia</sitename>
<base>https://en.wikipedia.org/wiki/Main_Page</base><namespaces><namespace key="0" />
<namespace key="6" case="first-letter">Bild</namespace></namespaces></siteinfo>
"""


def page(title: str, text: str, *, ns: int = 0, number: int = 7, extra: str = "", when: str = "2020-01-01") -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return (
        f"  <page>\n<title>{title}</title>\n<ns>{ns}</ns>\n<id>{number}</id>{extra}\n<revision><id>5</id>"
        f"<timestamp>{when}T00:00:00Z</timestamp><model>wikitext</model>"
        f'<text bytes="1" xml:space="preserve">{escaped}</text></revision>\n</page>\n'
    )


PAGES = [page(f"Page {i}", f"'''Text''' of page {i} [[Bild:x.png]] &amp;<ref>no</ref>", number=i) for i in range(40)]
DUMP = (HEAD + "".join(PAGES) + "</mediawiki>").encode()


def test_an_article_has_title_text_and_where_it_is_from() -> None:
    documents, refusals = extract_bytes("wikipedia-en", "d.xml", (HEAD + PAGES[3] + "</mediawiki>").encode())
    assert refusals == []
    assert documents[0].text == "Page 3\n\nText of page 3 &"
    assert documents[0].meta["origin"] == "d.xml#3"
    assert documents[0].meta["url"] == "https://en.wikipedia.org/wiki/Page_3"
    assert documents[0].meta["licence"] == "CC-BY-SA-3.0"


def test_characters_by_number_and_signatures() -> None:
    escaped = "caf&#233; &amp;#65; &lt;nowiki/&gt;and &quot;so&quot; on. ~~~~"
    raw = page("It&#039;s &#x41;", "TEXT").replace("TEXT", escaped)
    documents, _ = extract_bytes("wikipedia-en", "d.xml", (HEAD + raw).encode())
    # The dump's own escapes are undone once, then those of the wikitext; what only a signature stood for goes.
    assert documents[0].text == 'It\'s A\n\ncafé A and "so" on.'


def test_the_licence_follows_the_date_of_the_revision() -> None:
    documents, _ = extract_bytes("wikipedia-en", "d.xml", (HEAD + page("A", "b", when="2024-01-01")).encode())
    assert documents[0].meta["licence"] == "CC-BY-SA-4.0"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (page("A", "#REDIRECT [[B]]"), "redirect"),
        (page("A", "x", extra='<redirect title="B" />'), "redirect"),
        (page("Talk:A", "x", ns=1), "not an article"),
        (page("A", "* [[B]]\n{{disambiguation}}"), "disambiguation page"),
        (page("A (disambiguation)", "* [[B]]"), "disambiguation page"),
        (page("A", "{{Infobox}}"), "no text"),
        (page("A", "x").replace("wikitext", "json"), "not wikitext"),
        (page("A", "x").replace("</page>", ""), "truncated page"),
    ],
)
def test_what_is_not_an_article_is_refused(raw: str, reason: str) -> None:
    documents, refusals = extract_bytes("wikipedia-en", "d.xml", (HEAD + raw).encode())
    assert documents == []
    assert [refusal.reason for refusal in refusals] == [reason]


def multistream() -> bytes:
    groups = ["".join(PAGES[i : i + 10]) for i in range(0, 40, 10)]
    return b"".join(bz2.compress(part.encode()) for part in (HEAD, *groups, "</mediawiki>"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("d.xml.bz2", bz2.compress(DUMP)),
        ("d.xml.zst", zstandard.compress(DUMP)),
        ("d-multistream.xml.bz2", multistream()),
        # Several streams that are cut anywhere, as pbzip2 does.
        ("d.xml.bz2", bz2.compress(DUMP[:3000]) + bz2.compress(DUMP[3000:])),
    ],
)
def test_every_packing_gives_the_same_articles(name: str, content: bytes) -> None:
    plain, _ = extract_bytes("wikipedia-en", "d.xml", DUMP)
    packed, refusals = extract_bytes("wikipedia-en", name, content)
    assert [document.text for document in packed] == [document.text for document in plain]
    assert len(plain) == 40
    assert refusals == []


def test_multistream_is_cut_where_workers_can_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from piledriver.corpus.raw.streams import RawStream
    from piledriver.corpus.sources import wikipedia_en

    monkeypatch.setattr(wikipedia_en, "BATCH_BYTES", 2)
    path = tmp_path / "d.xml.bz2"
    path.write_bytes(multistream())
    pieces = list(wikipedia_en.SOURCE.pieces(iter([RawStream("d", "d.xml.bz2", str(path))])))
    assert len(pieces) == 6
    assert sum(len(list(wikipedia_en.SOURCE.documents(piece))) for piece in pieces) == 40


def test_ranges_of_a_plain_dump_share_no_page_and_lose_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from piledriver.corpus.sources import wikipedia_en

    for size in (37, 100, 311, 5000):
        monkeypatch.setattr(wikipedia_en, "RANGE_BYTES", size)
        documents, _ = extract_bytes("wikipedia-en", "d.xml", DUMP)
        assert [document.meta["page_id"] for document in documents] == [str(i) for i in range(40)]


def test_a_wikitext_file_is_a_page() -> None:
    documents, _ = extract_bytes("wikipedia-en", "Royal_Cinema.txt", b"The '''Royal''' is a [[cinema]].")
    assert documents[0].text == "Royal Cinema\n\nThe Royal is a cinema."


def test_a_truncated_compressed_dump_gives_what_is_there() -> None:
    packed = bz2.compress(DUMP)
    _, refusals = extract_bytes("wikipedia-en", "d.xml.bz2", packed[: len(packed) // 2])
    assert refusals


@given(st.binary(max_size=300), st.integers(0, 2000), st.integers(0, 50))
@settings(max_examples=60)
def test_damage_never_gets_out(noise: bytes, at: int, cut: int) -> None:
    damaged = DUMP[:at] + noise + DUMP[at + cut :]
    documents, refusals = extract_bytes("wikipedia-en", "d.xml", damaged)
    assert len(documents) + len(refusals) >= 1


@pytest.mark.skipif(not (SAMPLES / "wikipedia-en").exists(), reason="the shared raw samples are not here")
def test_samples_leave_no_markup() -> None:
    documents, refusals = extract_paths("wikipedia-en", SAMPLES / "wikipedia-en")
    assert len(documents) > 900
    assert {refusal.reason for refusal in refusals} <= {"not an article", "redirect", "no text", "disambiguation page"}
    clean = [d for d in documents if not any(mark in d.text for mark in ("[[", "{{", "'''", "<ref", "{|"))]
    assert len(clean) >= len(documents) - 1  # one sample has lost its line breaks and with them its tables


def test_the_parts_of_a_dump_are_found_in_a_folder(tmp_path: Path) -> None:
    name = "enwiki-20240101-pages-articles1.xml-p1p41242"
    (tmp_path / f"{name}.bz2").write_bytes(multistream())
    (tmp_path / "enwiki-20240101-pages-articles-multistream-index1.txt-p1p41242.bz2").write_bytes(b"x")
    documents, refusals = extract_paths("wikipedia-en", tmp_path)
    assert documents
    assert {item.meta["origin"].partition("#")[0] for item in documents} == {f"{tmp_path.name}/{name}.bz2"}
    assert not [refusal for refusal in refusals if "index" in refusal.origin]
