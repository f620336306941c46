"""NIH ExPorter: headers, duplicates, encodings."""

from __future__ import annotations

import io
import zipfile

import pytest
from hypothesis import given, settings

from piledriver.corpus.sources.nih_exporter import clean_abstract
from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths
from tests.corpus.sources.mutating import mutations


def zipped(*tables: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number, table in enumerate(tables):
            archive.writestr(f"RePORTER_PRJABS_C_FY{2000 + number}.csv", table)
    return buffer.getvalue()


HEADER = b'"APPLICATION_ID","ABSTRACT_TEXT"\r\n'


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("DESCRIPTION (provided by applicant): Mice.", "Mice."),
        ("DESCRIPTION: (Adapted from the applicant's abstract) Mice.", "Mice."),
        ("Project Summary/Abstract\nMice run.", "Mice run."),
        ("PROJECT SUMMARY (See instructions):\n Mice.", "Mice."),
        ("ABSTRACT Mice run.", "Mice run."),
        ("Abstract thought is hard.", "Abstract thought is hard."),
        ("Summary statistics are used.", "Summary statistics are used."),
    ],
)
def test_headers_of_the_form_are_removed_and_sentences_are_not(raw: str, text: str) -> None:
    assert clean_abstract(raw) == text


def test_duplicates_by_id_then_by_text_across_files() -> None:
    first = HEADER + b'"1","We study\nmice."\r\n"2","We  study mice."\r\n"3",""\r\n'
    second = HEADER + b'"1","Other text."\r\n"4","More."\r\n'
    found, refusals = extract_bytes("nih-exporter", "abs.zip", zipped(first, second))
    assert [document.text for document in found] == ["We study mice.", "More."]
    assert [refusal.reason for refusal in refusals] == ["duplicate text", "no abstract", "duplicate application id"]
    assert found[1].meta["origin"] == "abs.zip!RePORTER_PRJABS_C_FY2001.csv#4"


def test_old_encodings_are_decoded_and_not_dropped() -> None:
    table = HEADER + '"1","naïve β"\r\n'.encode() + '"2","the “naïve” way"\r\n'.encode("cp1252")
    found, _ = extract_bytes("nih-exporter", "a.csv", table)
    assert [document.text for document in found] == ["naïve β", "the “naïve” way"]


def test_another_table_is_refused_once() -> None:
    _, refusals = extract_bytes("nih-exporter", "a.csv", b"Title,Year\nx,1\ny,2\n")
    assert [refusal.reason for refusal in refusals] == ["no abstract column"]


@pytest.mark.skipif(not (SAMPLES / "nih-exporter").is_dir(), reason="../shared/raw-samples is not here")
def test_real_table() -> None:
    found, refusals = extract_paths("nih-exporter", SAMPLES / "nih-exporter")
    assert len(found) > 30
    assert {refusal.reason for refusal in refusals} == {
        "duplicate application id",
        "duplicate text",
        "no abstract column",
    }
    assert not any("\n" in document.text or document.text.upper().startswith("PROJECT SUMMARY") for document in found)


@settings(max_examples=40, deadline=None)
@given(mutations(HEADER + b'"1","We study\nmice."\r\n"2","x"\r\n'))
def test_mutated_tables_never_raise(content: bytes) -> None:
    _, refusals = extract_bytes("nih-exporter", "a.csv", content)
    assert all(refusal.reason != "parser failed" for refusal in refusals)
