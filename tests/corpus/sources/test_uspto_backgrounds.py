"""USPTO Backgrounds: the three formats, and what counts as background."""

from __future__ import annotations

import io
import zipfile

import pytest
from hypothesis import given, settings

from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths
from tests.corpus.sources.mutating import mutations, parse_without_failure

APS = """PATN
WKU  039327094
TTL  Electronic telephone
ISD  19760113
INVT
NAM  Hoff; Don G.
BSUM
PAC  BACKGROUND OF THE INVENTION
PAR  H.sub.2 O at 10.degree. C. is used
      here, .alpha.-iron too.
PAC  2. Description of the Prior Art
PA1  Older.
PAC  SUMMARY OF THE INVENTION
PAR  Newer.
DRWD
PAC  BACKGROUND FIGURES
PAR  Not this.
"""
XML_4 = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE us-patent-grant SYSTEM "us-patent-grant-v42-2006-08-23.dtd" [ ]>
<us-patent-grant lang="EN"><us-bibliographic-data-grant><publication-reference><document-id><country>US</country>
<doc-number>07272630</doc-number><kind>B2</kind><date>20070918</date></document-id></publication-reference>
<invention-title>Finding</invention-title></us-bibliographic-data-grant><description id="description">
<heading id="h-1" level="1">TECHNICAL FIELD</heading><p>Field.</p>
<heading id="h-2" level="1">BACKGROUND</heading>
<p id="p-1">Old <b>10</b> m<sup>2</sup>, see <figref>FIG. 1</figref>.</p>
<heading id="h-3" level="2">Sub</heading><p>More.<ul><li>one</li></ul></p>
<heading id="h-4" level="1">SUMMARY</heading><p>New.</p></description></us-patent-grant>
"""
XML_2 = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE PATDOC SYSTEM "ST32-US-Grant-025xml.dtd" [
<!ENTITY US06336130-20020101-D00000.TIF SYSTEM "US06336130-20020101-D00000.TIF" NDATA TIF>
]>
<PATDOC DTD="2.5">
<SDOBI><B100><B110><DNUM><PDAT>06336130</PDAT></DNUM></B110></B100><B500><B540><STEXT><PDAT>Calls</PDAT>
</STEXT></B540></B500></SDOBI><SDODE><BRFSUM><BTEXT><H LVL="1"><STEXT><PDAT>BACKGROUND</PDAT></STEXT></H>
<PARA ID="P-1" LVL="0">
<PTEXT><PDAT>CO</PDAT><HIL><SB><PDAT>2</PDAT></SB></HIL><PDAT> &lsquo;now&rsquo;.</PDAT></PTEXT></PARA>
</BTEXT></BRFSUM><DETDESC><BTEXT><PARA><PTEXT><PDAT>Detail.</PDAT></PTEXT></PARA></BTEXT></DETDESC></SDODE></PATDOC>
"""


def test_aps_takes_the_background_of_the_summary_with_its_parts() -> None:
    found, refusals = extract_bytes("uspto-backgrounds", "pftaps19760113_wk02.txt", APS.encode())
    assert not refusals
    assert found[0].text == "H₂O at 10° C. is used here, α-iron too.\n2. Description of the Prior Art\nOlder."
    assert found[0].meta["patent"] == "US3932709"
    assert found[0].meta["inventor"] == ["Hoff; Don G."]
    assert found[0].meta["date"] == "1976-01-13"


def test_xml_4_takes_the_section_and_its_subsections() -> None:
    found, _ = extract_bytes("uspto-backgrounds", "ipg070918.xml", XML_4.encode())
    assert found[0].text == "Old 10 m², see FIG. 1.\nSub\nMore.\n- one"
    assert found[0].meta["patent"] == "US7272630"


def test_xml_2_5_takes_the_whole_brief_summary() -> None:
    found, _ = extract_bytes("uspto-backgrounds", "pg020101.xml", XML_2.encode())
    assert found[0].text == "BACKGROUND\nCO₂ ‘now’."


def test_many_documents_in_one_file_of_a_zip() -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(
            "ipg070918.xml", XML_4 + XML_4.replace("07272630", "07272631") + XML_4.replace("BACKGROUND", "OTHER")
        )
        archive.writestr("pftaps.txt", APS + APS.replace("039327094", "039327102"))
    found, refusals = extract_bytes("uspto-backgrounds", "week.zip", buffer.getvalue())
    assert [document.meta["patent"] for document in found] == ["US7272630", "US7272631", "US3932709", "US3932710"]
    assert found[1].meta["origin"] == "week.zip!ipg070918.xml#US7272631"
    assert [refusal.reason for refusal in refusals] == ["no background"]


def test_a_broken_document_refuses_itself_alone() -> None:
    content = (XML_4.replace("</description>", "") + XML_4).encode()
    found, refusals = extract_bytes("uspto-backgrounds", "ipg.xml", content)
    assert len(found) == 1
    assert [refusal.reason for refusal in refusals] == ["invalid xml"]


def test_an_empty_file_is_refused_and_the_label_of_a_tape_is_not_a_patent() -> None:
    assert [refusal.reason for refusal in extract_bytes("uspto-backgrounds", "a.xml", b"\n")[1]] == ["empty file"]
    found, refusals = extract_bytes(
        "uspto-backgrounds", "a.txt", b"HHHHHT     APS1     ISSUE - 760106\n" + APS.encode()
    )
    assert (len(found), refusals) == (1, [])


def test_pieces_of_a_large_file_hold_whole_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piledriver.corpus.sources.shared.record_pieces.PIECE_BYTES", 3000)
    found, refusals = extract_bytes("uspto-backgrounds", "ipg.xml", (XML_4 * 40).encode())
    assert len(found) == 40
    assert not refusals


@pytest.mark.skipif(not (SAMPLES / "uspto-backgrounds").is_dir(), reason="../shared/raw-samples is not here")
def test_real_patents() -> None:
    found, refusals = extract_paths("uspto-backgrounds", SAMPLES / "uspto-backgrounds")
    assert len(found) == 10
    assert [refusal.reason for refusal in refusals] == ["no background"]
    for document in found:
        assert len(document.text) > 500
        assert "<" not in document.text or "</" not in document.text
        assert document.meta["title"]


@settings(max_examples=60, deadline=None)
@given(mutations((APS + XML_2 + XML_4).encode()))
def test_mutated_files_never_raise(content: bytes) -> None:
    parse_without_failure("uspto-backgrounds", content)


def test_headings_that_aps_does_not_mark_and_tables_are_kept() -> None:
    body = (
        "PATN\nWKU  040000001\nTTL  T\nBSUM\nPAR  BACKGROUND OF THE INVENTION\nPAR  Old.\nTBL  ____________\n"
        "     A    B\n     ____________\n     1    2\nPAR  SUMMARY OF THE INVENTION\nPAR  New.\n"
    )
    for content in (body, f"HHHHHT        APS1\n{body}" + APS):
        found, _ = extract_bytes("uspto-backgrounds", "pftaps19760113_wk02.txt", content.encode())
        assert found[0].text == "Old.\nA    B\n1    2"
        # The number, wherever the document stands in its file.
        assert found[0].meta["origin"] == "pftaps19760113_wk02.txt#US4000000"
