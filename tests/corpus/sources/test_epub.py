from __future__ import annotations

import io
import re
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.corpus.formats import epub
from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths

CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/a.opf"/></rootfiles></container>'
)
PACKAGE = """<package xmlns="http://www.idpf.org/2007/opf"><metadata xmlns:dc="http://purl.org/dc/elements/1.1/">
<dc:title>On Tea</dc:title><dc:creator>Ann</dc:creator><dc:language>en</dc:language>
<dc:rights>Public domain in the USA.</dc:rights></metadata><manifest>
<item id="two" href="c%202.xhtml" media-type="application/xhtml+xml"/>
<item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>
<item id="one" href="c1.xhtml" media-type="application/xhtml+xml"/>
<item id="pic" href="p.png" media-type="image/png"/></manifest>
<spine><itemref idref="nav"/><itemref idref="one"/><itemref idref="two"/><itemref idref="gone"/></spine></package>"""


def chapter(body: str) -> str:
    return (
        '<?xml version="1.0"?><!DOCTYPE html><html xmlns="http://www.w3.org/1999/xhtml" '
        f'xmlns:epub="http://www.idpf.org/2007/ops"><head><title/></head><body>{body}</body></html>'
    )


def book(**files: str) -> bytes:
    content = {
        "META-INF/container.xml": CONTAINER,
        "OEBPS/a.opf": PACKAGE,
        "OEBPS/c 2.xhtml": chapter("<p>Second&nbsp;one.</p>"),
        "OEBPS/c1.xhtml": chapter('<h1><a id="x"/>First</h1><p>It<br/>rains.</p>'),
        "OEBPS/nav.xhtml": chapter("<nav>Contents</nav>"),
    } | {name.replace("__", "/").replace("_dot_", "."): text for name, text in files.items()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in content.items():
            if text:
                archive.writestr(name, text)
    return packed.getvalue()


@pytest.mark.parametrize("slug", ["epub", "books3", "bookcorpus2"])
def test_chapters_in_the_order_of_the_spine(slug: str) -> None:
    documents, refusals = extract_bytes(slug, "a.epub", book())
    assert not refusals
    assert documents[0].text == "# First\n\nIt\nrains.\n\nSecond one."
    assert documents[0].meta["title"] == "On Tea"
    assert documents[0].meta["author"] == "Ann"
    assert documents[0].meta["licence"] == "public-domain"


def test_a_line_of_copyright_is_no_licence() -> None:
    rights = re.sub(r"<dc:rights>.*?</dc:rights>", "<dc:rights>Copyright © 2010 Ann</dc:rights>", PACKAGE)
    documents, _ = extract_bytes("books3", "a.epub", book(OEBPS__a_dot_opf=rights))
    assert documents[0].meta["licence"] == "unknown"
    assert documents[0].meta["rights"] == "Copyright © 2010 Ann"


def test_what_is_no_text_of_the_book_is_left_out() -> None:
    body = '<section epub:type="colophon"><p>Printed</p></section><p>Te<span epub:type="pagebreak">12</span>xt</p>'
    documents, _ = extract_bytes("epub", "a.epub", book(OEBPS__c1_dot_xhtml=chapter(body)))
    assert documents[0].text == "Text\n\nSecond one."


def test_a_chapter_that_is_no_xml_is_read_as_html() -> None:
    documents, _ = extract_bytes("epub", "a.epub", book(OEBPS__c1_dot_xhtml="<p>One<p>Two <b>three"))
    assert documents[0].text == "One\n\nTwo three\n\nSecond one."


def test_a_book_without_container() -> None:
    documents, _ = extract_bytes("epub", "a.epub", book(**{"META-INF__container_dot_xml": ""}))
    assert documents[0].text.startswith("# First")


def test_what_is_not_read_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    method = '<EncryptionMethod Algorithm="{}"/>'
    drm = method.format("http://www.w3.org/2001/04/xmlenc#aes128-cbc")
    font = method.format("http://www.idpf.org/2008/embedding")
    bomb = PACKAGE.replace("<package", '<!DOCTYPE p [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><package').replace(
        "On Tea", "&b;"
    )
    cases = [
        (book(**{"META-INF__encryption_dot_xml": f"<encryption>{drm}</encryption>"}), "encrypted"),
        (book(**{"META-INF__container_dot_xml": "", "OEBPS__a_dot_opf": ""}), "no package"),
        (book(OEBPS__a_dot_opf="<package"), "invalid xml"),
        (b"PK\x03\x04 not a zip", "damaged epub"),
        (book(**{"OEBPS__c1_dot_xhtml": chapter(""), "OEBPS__c 2_dot_xhtml": chapter("")}), "no text"),
    ]
    for content, reason in cases:
        documents, refusals = extract_bytes("epub", "a.epub", content)
        assert not documents
        assert [refusal.reason for refusal in refusals] == [reason]
    assert extract_bytes(
        "epub", "a.epub", book(**{"META-INF__encryption_dot_xml": f"<encryption>{font}</encryption>"})
    )[0]
    assert "aaaa" not in str(extract_bytes("epub", "a.epub", book(OEBPS__a_dot_opf=bomb)))
    monkeypatch.setattr(epub, "MAX_BOOK_BYTES", 300)
    assert extract_bytes("epub", "a.epub", book())[1][0].reason == "too large"


@pytest.mark.skipif(not (SAMPLES / "books3").exists(), reason="no raw samples here")
def test_samples() -> None:
    documents, refusals = extract_paths("books3", SAMPLES / "books3")
    assert not refusals
    assert "Alice was beginning to get very tired of sitting by her sister" in documents[0].text
    assert len(extract_paths("bookcorpus2", SAMPLES / "bookcorpus2")[0]) == 3


VALID = book()


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=40), st.integers(0, len(VALID)))
def test_any_bytes_end_in_a_document_or_a_refusal(noise: bytes, at: int) -> None:
    for content in (noise, VALID[:at] + noise + VALID[at + len(noise) :], VALID[:at]):
        documents, refusals = extract_bytes("epub", "a.epub", content)
        assert len(documents) + len(refusals) == 1


def test_the_number_of_a_note_stays_apart_from_the_word() -> None:
    assert (
        epub.chapter_text(chapter('<p>Once<a epub:type="noteref" href="#n">1</a> upon a time.</p>').encode())
        == "Once[1] upon a time."
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_of_the_forms_of_a_switch_one_is_read(compiled: bool) -> None:
    math = '<math xmlns="http://www.w3.org/1998/Math/MathML"><mi>x</mi></math>'
    forms = "<epub:case required-namespace='n'>{}</epub:case><epub:default>an x</epub:default>"

    def text(case: str) -> str:
        body = f"<p>Let <epub:switch>{forms.format(case)}</epub:switch> be.</p>"
        return epub.chapter_text(chapter(body).encode(), compiled=compiled)

    assert text(math) == "Let $x$ be."
    assert text("<cml/>") == "Let an x be."
