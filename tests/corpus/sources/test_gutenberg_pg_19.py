from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.corpus.formats.gutenberg import without_boilerplate
from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths

BOOK = (
    "CHAPTER I\n\nCall me Ishmael. Some years ago--never mind how long\nprecisely--I thought I would sail about.\n\n"
    "THE END"
)
HEADER = (
    "The Project Gutenberg EBook of Moby, by H. M.\n\nTitle: Moby\n       or The Whale\n\nAuthor: H. M.\n\n"
    "Release Date: May, 2001 [EBook #2701]\n\nLanguage: English\n\n"
)
LICENCE = "\n\nSection 1. General Terms of Use\n\nDonations are accepted.\n"

START = "*** START OF THIS PROJECT GUTENBERG EBOOK MOBY ***\n\n"
END = "\n\n*** END OF THIS PROJECT GUTENBERG EBOOK MOBY ***"
SMALL_PRINT = "*END*THE SMALL PRINT! FOR PUBLIC DOMAIN EBOOKS*Ver.02/11/02*END*\n\n"

FRAMES = {
    "this, 2006": (f"{HEADER}{START}\n", END),
    "the, tight": (
        f"{HEADER}***START OF THE PROJECT GUTENBERG EBOOK MOBY***\n\n",
        "\n\n***END OF THE PROJECT GUTENBERG EBOOK MOBY***",
    ),
    "title over two lines": (
        f"{HEADER}*** START OF THE PROJECT GUTENBERG EBOOK MOBY; OR,\nTHE WHALE ***\n\n",
        f"\n\nEnd of Project Gutenberg's Moby, by H. M.{END}",
    ),
    "small print of the nineties": (
        "The Project Gutenberg Etext of Moby\n\n***START**THE SMALL PRINT!**FOR PUBLIC DOMAIN ETEXTS**START***\n"
        "Why is this?\n\n*END*THE SMALL PRINT! FOR PUBLIC DOMAIN ETEXTS*Ver.04.29.93*END*\n\n",
        "\n\nEnd of The Project Gutenberg Etext of Moby",
    ),
    "small print of 2002": (
        f"Project Gutenberg's Moby, by H. M.\n\n{SMALL_PRINT}",
        "\n\n\nEnd of Project Gutenberg's Moby, by H. M.",
    ),
    "a start mark and then the small print": (f"{HEADER}{START}{SMALL_PRINT}", END),
    "credits": (
        f"{HEADER}{START}Produced by A. B. and the Online Distributed\nProofreading Team\n\n"
        "E-text prepared by C. D.\n\n[Illustration]\n\n",
        f"{END}\n\n***** This file should be named 2701.txt *****",
    ),
    "transcribed from": (f"{HEADER}{START}\nTranscribed from the 1908 Longmans edition by D.\nPrice, email x\n\n", END),
    "licence marked at the end": (f"{HEADER}{START}", "\n\n*** START: FULL LICENSE ***"),
}


@pytest.mark.parametrize("frame", FRAMES)
def test_the_book_is_what_is_left(frame: str) -> None:
    before, after = FRAMES[frame]
    for line_break in ("\n", "\r\n"):
        content = (before + BOOK + after + LICENCE).replace("\n", line_break).encode("latin-1")
        documents, _ = extract_bytes("gutenberg-pg-19", "2701.txt", content)
        assert documents[0].text == BOOK
        assert documents[0].meta["gutenberg_id"] == 2701
        assert documents[0].meta["licence"] == "public-domain"


def test_the_header_is_kept_as_meta() -> None:
    before, after = FRAMES["this, 2006"]
    meta = extract_bytes("gutenberg-pg-19", "x.txt", (before + BOOK + after).encode())[0][0].meta
    assert meta["title"] == "Moby or The Whale"
    assert (meta["author"], meta["language"], meta["release_date"]) == ("H. M.", "English", "May, 2001")


def test_a_text_without_frame_is_kept() -> None:
    documents, _ = extract_bytes("gutenberg-pg-19", "10.txt", BOOK.encode())
    assert documents[0].text == BOOK


def test_a_licence_may_be_longer_than_the_book() -> None:
    before, after = FRAMES["this, 2006"]
    documents, _ = extract_bytes("gutenberg-pg-19", "10.txt", (before + "A poem." + after + LICENCE * 300).encode())
    assert documents[0].text == "A poem."


def test_a_copyrighted_book_is_refused() -> None:
    header = "** This is a COPYRIGHTED Project Gutenberg eBook, Details Below **\n\n"
    _, refusals = extract_bytes("gutenberg-pg-19", "10.txt", (header + START + BOOK).encode())
    assert refusals[0].reason == "copyrighted"


def test_an_old_encoding_is_read() -> None:
    content = f"{HEADER}Character set encoding: ISO-8859-1\n\n{START}Été à Genève."
    documents, _ = extract_bytes("gutenberg-pg-19", "10.txt", content.encode("latin-1"))
    assert documents[0].text == "Été à Genève."


@pytest.mark.skipif(not (SAMPLES / "gutenberg-pg-19").exists(), reason="no raw samples here")
def test_samples() -> None:
    documents, _ = extract_paths("gutenberg-pg-19", SAMPLES / "gutenberg-pg-19")
    assert [document.text[:17] for document in documents] == [
        "NEWS FROM NOWHERE",
        "THE DEVIL'S DICTI",
        "The Internet Wire",
    ]
    assert all("Project Gutenberg" not in document.text for document in documents)


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet=" \n*ABENDSTOFHPRJCGU", max_size=200), st.binary(max_size=60))
def test_any_text_ends_in_a_document_or_a_refusal(text: str, noise: bytes) -> None:
    assert isinstance(without_boilerplate(text), str)
    documents, refusals = extract_bytes("gutenberg-pg-19", "1.txt", FRAMES["credits"][0].encode() + noise)
    assert len(documents) + len(refusals) == 1


def test_books_are_found_in_a_folder_under_the_names_they_are_served_by(tmp_path: Path) -> None:
    for name in ("2701.txt", "2702.txt.utf-8", "pg2703.txt.utf8"):
        (tmp_path / name).write_text("Call me Ishmael. Some years ago I went to sea.\n")
    documents, _ = extract_paths("gutenberg-pg-19", tmp_path)
    assert [document.meta["gutenberg_id"] for document in documents] == [2701, 2702, 2703]
