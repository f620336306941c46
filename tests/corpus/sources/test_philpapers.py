"""PhilPapers: records, papers, and the filter for the text of PDFs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings

from piledriver.corpus.formats.pdf.pile_filter import filtered
from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths
from tests.corpus.sources.mutating import mutations, parse_without_failure

RECORD = """<OAI-PMH xmlns="http://www.openarchives.org/OAI/2.0/"><ListRecords>
<record><header status="deleted"><identifier>oai:p:1</identifier></header></record>
<record><header><identifier>oai:p:2</identifier></header><metadata>
<oai_dc:dc xmlns:oai_dc="http://www.openarchives.org/OAI/2.0/oai_dc/" xmlns:dc="http://purl.org/dc/elements/1.1/">
<dc:title>On Being</dc:title><dc:creator>Doe, J.</dc:creator><dc:description>It
 is.</dc:description><dc:description>Comment: 7 pages</dc:description><dc:source>A journal</dc:source>
<dc:rights>http://creativecommons.org/licenses/by/4.0/</dc:rights><dc:identifier>https://p.org/2</dc:identifier>
</oai_dc:dc></metadata></record></ListRecords></OAI-PMH>"""


def test_a_record_gives_title_and_abstract_and_its_fields() -> None:
    found, refusals = extract_bytes("philpapers", "records.xml", RECORD.encode())
    assert [refusal.reason for refusal in refusals] == ["deleted record"]
    assert found[0].text == "On Being\n\nIt is."
    meta = found[0].meta
    assert (meta["origin"], meta["licence"], meta["url"]) == ("records.xml#oai:p:2", "CC-BY-4.0", "https://p.org/2")
    assert (meta["creator"], meta["dc_source"]) == (["Doe, J."], ["A journal"])


def test_an_error_answer_is_refused_with_its_code() -> None:
    _, refusals = extract_bytes("philpapers", "e.xml", b'<OAI-PMH><error code="noRecordsMatch">none</error></OAI-PMH>')
    assert [(refusal.reason, refusal.detail) for refusal in refusals] == [("oai error", "noRecordsMatch: none")]


@pytest.mark.parametrize(
    ("paragraph", "kept"),
    [
        ("The two-\nfold path is de-\nscribed here.", "The twofold path is described here."),
        ("© 2001 The Press. All rights reserved.", ""),
        ("- 17 -", ""),
        ("a b c d e f g h", ""),
        ("12.4 33.1 99.2 11.0 (3) [4]", ""),
        ("word (cid:12) " + "more words here " * 8, "word " + " ".join(["more words here"] * 8)),
        ("Kurt G¨odel wrote", "Kurt Gödel wrote"),
        ("(cid:1) (cid:2) word (cid:3)", ""),
        ("the ﬁrst eﬀect", "the first effect"),
    ],
)
def test_each_rule_of_the_filter(paragraph: str, kept: str) -> None:
    assert filtered(paragraph) == kept


def test_a_damaged_pdf_is_refused() -> None:
    _, refusals = extract_bytes("philpapers", "a.pdf", b"%PDF-1.4 nothing")
    assert [refusal.reason for refusal in refusals] == ["damaged pdf"]


@pytest.mark.skipif(not (SAMPLES / "philpapers").is_dir(), reason="../shared/raw-samples is not here")
def test_a_pdf_takes_the_fields_of_the_record_of_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "phil"
    folder.mkdir()
    shutil.copy(SAMPLES / "philpapers" / "N18-3011.pdf", folder / "DOEOB.pdf")
    (folder / "DOEOB.xml").write_text(RECORD)
    found, refusals = extract_paths("philpapers", folder)
    assert not refusals
    assert found[0].meta["creator"] == ["Doe, J."]
    assert "algorithmic manipulation and discovery." in found[0].text


@settings(max_examples=40, deadline=None)
@given(mutations(RECORD.encode()))
def test_mutated_records_never_raise(content: bytes) -> None:
    parse_without_failure("philpapers", content, "x.xml")


def test_markup_inside_a_field_is_read_and_formulas_stay() -> None:
    fields = (
        "<dc:title>On &amp;quot;Being&amp;quot;</dc:title>"
        "<dc:description>One.&lt;br/&gt;Two &lt;i&gt;x&lt;/i&gt;, a &lt; b and c&lt;d&gt;e</dc:description>"
    )
    record = f"<record><header><identifier>1</identifier></header><metadata><dc>{fields}</dc></metadata></record>"
    documents, _ = extract_bytes("philpapers", "a.xml", f"<OAI-PMH>{record}</OAI-PMH>".encode())
    assert documents[0].text == 'On "Being"\n\nOne.\nTwo x, a < b and c<d>e'


def test_records_in_other_forms_than_dublin_core() -> None:
    record = (
        '<record><header><identifier>oai:arXiv.org:1</identifier></header><metadata><arXiv xmlns="http://arxiv.org/OAI/'
        'arXiv/"><id>1</id><title>On\n  X</title><abstract>  We show $x_1$.\n</abstract><authors><author><keyname>Roe'
        "</keyname> <forenames>R.</forenames></author></authors>"
        "<license>http://creativecommons.org/licenses/by/4.0/</license></arXiv></metadata></record>"
    )
    documents, _ = extract_bytes(
        "philpapers", "r.xml", f"<OAI-PMH><ListRecords>{record}</ListRecords></OAI-PMH>".encode()
    )
    assert documents[0].text == "On X\n\nWe show $x_1$."
    assert (documents[0].meta["licence"], documents[0].meta["creator"]) == ("CC-BY-4.0", ["Roe R."])
