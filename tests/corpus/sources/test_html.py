from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.sources.extracting import extract_bytes

PROSE = "This is a sentence of the article, and it has a clause. Here is another one, which makes it prose. " * 4


def test_a_page_with_what_it_says_of_itself() -> None:
    page = (
        f'<html lang="de"><title>A &lt; B</title><nav><a href=/>Home</a></nav><p>{PROSE}</p>'
        '<a rel="license" href="http://creativecommons.org/licenses/by-sa/4.0/">licence</a>'
    )
    documents, _ = extract_bytes("html", "a.html", page.encode())
    assert documents[0].text == PROSE.strip()
    assert documents[0].meta["title"] == "A < B"
    assert documents[0].meta["html_language"] == "de"
    assert documents[0].meta["licence"] == "CC-BY-SA-4.0"


def test_an_empty_page_is_refused() -> None:
    documents, refusals = extract_bytes("html", "a.html", b"<html></html>")
    assert not documents
    assert refusals[0].reason == "empty text"


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_end_in_documents_or_refusals(noise: bytes) -> None:
    documents, refusals = extract_bytes("html", "a.html", noise)
    assert len(documents) + len(refusals) == 1
