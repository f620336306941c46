"""EuroParl: tags to text."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piledriver.corpus.sources.europarl import without_tags
from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths

SITTING = (
    '<CHAPTER ID=1>\nOuverture\n<SPEAKER ID=1 LANGUAGE="FR" NAME="Berthu">\n'
    + "Merci & bonjour. " * 20
    + "\n<P>\nFin.\n"
)


def test_tags_stand_anywhere() -> None:
    flat = '<CHAPTER ID=1> Opening <SPEAKER ID=1 NAME="President"> I declare <P>'
    flat += "this open.<BRK> (Applause) </P><XYZ a=b> End"
    assert without_tags(flat) == "Opening\n\nPresident\nI declare\nthis open.\n(Applause)\nEnd"


def test_the_archive_says_language_and_date() -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in (
            ("txt/fr/ep-99-01-17-003.txt", SITTING.encode("latin-1")),
            ("txt/fr/ep-99-01-18.txt", b"<CHAPTER ID=1>"),
            ("tools/README", b"no data"),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    documents, refusals = extract_bytes("europarl", "europarl.tgz", packed.getvalue())
    assert [refusal.reason for refusal in refusals] == ["shorter than 200 characters"]
    assert documents[0].meta["language"] == "fr"
    assert documents[0].meta["date"] == "1999-01-17"
    assert documents[0].text.startswith("Ouverture\n\nBerthu\nMerci & bonjour.")


@given(st.text(alphabet="<>/PSPEAKERNAME=\"' \nab&;", max_size=200))
def test_any_text(raw: str) -> None:
    assert "<P>" not in without_tags(raw)


@pytest.mark.skipif(not (SAMPLES / "europarl").exists(), reason="the shared raw samples are not here")
def test_samples() -> None:
    documents, refusals = extract_paths("europarl", SAMPLES / "europarl")
    assert refusals == []
    assert len(documents) == 6
    assert not any("<" in document.text for document in documents)


def test_the_language_is_told_from_the_text_where_the_path_does_not() -> None:
    german = (
        b"<SPEAKER ID=1 NAME=A>\n"
        + "Ich erkläre die Sitzungsperiode des Parlaments für wiederaufgenommen. ".encode() * 5
    )
    documents, _ = extract_bytes("europarl", "ep-00-01-17.txt", german)
    assert documents[0].meta["language"] == "de"
