from __future__ import annotations

import bz2
import csv
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths


def opinion(**more: Any) -> bytes:
    return json.dumps({"id": 7, "court": "/api/rest/v2/jurisdiction/scotus/", "plain_text": "Plain.", **more}).encode()


def text_of(content: bytes) -> str:
    return extract_bytes("freelaw", "7.json", content)[0][0].text


def test_the_last_form_that_is_not_empty_is_taken() -> None:
    assert text_of(opinion()) == "Plain."
    assert text_of(opinion(html="<p>HTML", html_lawbox="")) == "HTML"
    assert (
        text_of(opinion(html="<p>HTML", xml_harvard="<opinion><author>J.</author><p>Harvard</p></opinion>"))
        == "J.\n\nHarvard"
    )


def test_markup_is_read_without_the_marks_of_pages() -> None:
    html = (
        "<center><h1>A<br>v.<br>B</h1></center><p>It <span class='star-pagination'>*288</span> is so.<sup>[1]</sup></p>"
        "<div class='num' id='p1'><span class='num'>1</span><p>Next.</p></div><blockquote><p>Law</p></blockquote>"
    )
    assert text_of(opinion(html=html)) == "# A v. B\n\nIt is so.[1]\n\nNext.\n\n> Law"


def test_numbers_of_pages_of_a_pdf_go() -> None:
    assert text_of(opinion(plain_text="One\n       - 2 -\n\fTwo\n 3 \n\f")) == "One\n\nTwo"


def test_meta_is_what_the_record_knows() -> None:
    citation = {"case_name": "A v. B", "federal_cite_one": "1 U.S. 2", "docket_number": "3"}
    documents, _ = extract_bytes("freelaw", "7.json", opinion(citation=citation, date_filed="1999-04-05"))
    meta = documents[0].meta
    assert (meta["case_id"], meta["case_jurisdiction"], meta["case_name"]) == (7, "scotus", "A v. B")
    assert (meta["citations"], meta["docket_number"], meta["date_filed"]) == (["1 U.S. 2"], "3", "1999-04-05")
    assert meta["licence"] == "public-domain"


def test_what_is_not_taken_says_why() -> None:
    unreadable = opinion(html="<p>Unable to extract the content from this file. Please try reading the original.</p>")
    for content, reason in (
        (unreadable, "unable to extract"),
        (opinion(plain_text=" "), "no text"),
        (b'{"name": "docket"}', "not an opinion"),
        (b"{", "invalid json"),
        (b"[1]", "not an opinion"),
    ):
        documents, refusals = extract_bytes("freelaw", "7.json", content)
        assert not documents
        assert [refusal.reason for refusal in refusals] == [reason]


def test_a_tar_of_tars_by_court(tmp_path: Path) -> None:
    def tar(path: str, content: bytes, mode: Any) -> bytes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode=mode) as archive:
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        return packed.getvalue()

    path = tmp_path / "all.tar"
    path.write_bytes(tar("ca9.tar.gz", tar("7.json", json.dumps({"id": 7, "html": "<p>x"}).encode(), "w:gz"), "w:"))
    documents, _ = extract_paths("freelaw", path)
    assert documents[0].meta["case_jurisdiction"] == "ca9"
    assert documents[0].meta["origin"] == "all.tar!ca9.tar.gz!7.json"


@pytest.mark.parametrize("escaped", [False, True], ids=["doubled quotes", "backslashes"])
def test_the_bulk_csv(escaped: bool) -> None:
    rows = io.StringIO()
    writer = csv.writer(rows, quoting=csv.QUOTE_ALL, doublequote=not escaped, escapechar="\\" if escaped else None)
    writer.writerow(["id", "cluster_id", "plain_text", "html_with_citations"])
    writer.writerow(["1", "10", 'He said "so",\nand left \\ it', ""])
    writer.writerow(["2", "20", "", '<p class="a">Two</p>'])
    writer.writerow(["3", "30", "", ""])
    documents, refusals = extract_bytes(
        "freelaw", "opinions-2022-08-02.csv.bz2", bz2.compress(rows.getvalue().encode())
    )
    assert [document.text for document in documents] == ['He said "so",\nand left \\ it', "Two"]
    assert documents[1].meta["cluster"] == "20"
    assert documents[1].meta["origin"] == "opinions-2022-08-02.csv.bz2#2"
    assert [refusal.reason for refusal in refusals] == ["not an opinion"]


@pytest.mark.skipif(not (SAMPLES / "freelaw").exists(), reason="no raw samples here")
def test_samples() -> None:
    documents, refusals = extract_paths("freelaw", SAMPLES / "freelaw")
    assert len(documents) == 60
    assert not refusals
    assert all("star-pagination" not in document.text for document in documents)


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=80), st.sampled_from(["7.json", "o.jsonl", "opinions.csv"]))
def test_any_bytes_end_in_documents_or_refusals(noise: bytes, name: str) -> None:
    extract_bytes("freelaw", name, noise)
    extract_bytes("freelaw", name, b"id,plain_text\n" + noise)
    extract_bytes("freelaw", name, opinion()[:-2] + noise)


def test_notes_keep_their_numbers_and_words_go_on_after_a_page() -> None:
    harvard = (
        '<opinion><p>The judg-<page-number label="12">*12</page-number>ment stands.<footnotemark>1</footnotemark></p>'
        '<footnote label="1"><p>See below.</p></footnote></opinion>'
    )
    linked = (
        '<p>The judg-<span class="star-pagination">*12</span>ment stands.<a class="footnote" href="#fn1">1</a></p>'
        '<div class="footnote" id="fn1"><a class="footnote" href="#fn1_ref">1</a><p>See below.</p></div>'
    )
    for field, markup in (("xml_harvard", harvard), ("html_with_citations", linked)):
        documents, _ = extract_bytes("freelaw", "1.json", json.dumps({"id": 1, field: markup}).encode())
        assert documents[0].text == "The judgment stands.[1]\n\n[1] See below."


def test_words_broken_at_the_end_of_a_line_are_whole() -> None:
    text = "a corpo-\n   ration, and a well-\nknown one; well-known"
    documents, _ = extract_bytes("freelaw", "1.json", json.dumps({"id": 1, "plain_text": text}).encode())
    assert documents[0].text == "a corporation,\n   and a well-\nknown one; well-known"


def test_plain_text_between_citations_stays_plain_text() -> None:
    cited = (
        '</pre><span class="citation" data-id="1"><a href="/opinion/1/roe/">410 U.S. 113</a></span><pre class="inline">'
    )
    begins = '<pre class="inline">   IN THE COURT\n\n   A corpo-\nration under '
    html = f"{begins}{cited} &amp; others.\n\n      - 2 -\n\x0cNext page.</pre>"
    documents, _ = extract_bytes("freelaw", "1.json", opinion(html_with_citations=html))
    assert documents[0].text == "   IN THE COURT\n\n   A corporation\nunder 410 U.S. 113 & others.\n\nNext page."
