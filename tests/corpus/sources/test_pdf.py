"""PDF: lines to paragraphs. The files are written here, so that every line stands where the test says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from piledriver.corpus.document import Document
from piledriver.corpus.sources.base import Piece
from piledriver.corpus.sources.pdf import SOURCE
from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths
from tests.corpus.sources.mutating import mutations, parse_without_failure

pytest.importorskip("pypdfium2")

Line = tuple[float, float, float, str]


def pdf(*pages: list[Line]) -> bytes:
    """A PDF with lines of (x, y, size, text) in Helvetica."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b""]
    objects.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>")
    kids = []
    for lines in pages:
        body = b"".join(
            b"BT /F1 %.1f Tf %.1f %.1f Td (%s) Tj ET\n" % (size, x, y, text.encode("cp1252").replace(b"(", b"\\("))
            for x, y, size, text in lines
        )
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(body), body))
        kids.append(len(objects) + 1)
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 600 800] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % len(objects)
        )
    references = b" ".join(b"%d 0 R" % kid for kid in kids)
    objects[1] = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (references, len(kids))
    out = b"%PDF-1.4\n"
    places = []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return out + (
        b"xref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF"
        % (len(objects) + 1, table, len(objects) + 1, len(out))
    )


def text_of(*pages: list[Line]) -> str:
    found = list(SOURCE.documents(Piece("x.pdf", data=pdf(*pages))))
    assert isinstance(found[0], Document)
    return found[0].text


FILL = "and this line of the text goes on to the right edge of the column"


def test_lines_of_a_paragraph_join_and_a_gap_starts_another() -> None:
    page = [(72, 700, 10, f"Here {FILL}"), (72, 688, 10, "and ends."), (72, 660, 10, "Next one.")]
    assert text_of(page) == f"Here {FILL} and ends.\n\nNext one."


def test_a_hyphen_at_the_end_of_a_line_goes_unless_the_document_writes_it() -> None:
    page = [
        (72, 700, 10, f"Well-known facts {FILL} are well-"),
        (72, 688, 10, f"known, {FILL} para-"),
        (72, 676, 10, "graphs too."),
    ]
    assert text_of(page) == f"Well-known facts {FILL} are well-known, {FILL} paragraphs too."


def test_headers_footers_and_page_numbers_go() -> None:
    pages = [
        [(72, 770, 9, "Journal of Tests 12"), (72, 700, 10, f"Page {word} says."), (300, 30, 9, str(number))]
        for number, word in enumerate(("one", "two", "three", "four"), 1)
    ]
    assert text_of(*pages) == "\n\n".join(f"Page {word} says." for word in ("one", "two", "three", "four"))


def test_a_sentence_goes_on_on_the_next_page() -> None:
    assert text_of([(72, 100, 10, f"It {FILL}")], [(72, 700, 10, "and stops.")]) == f"It {FILL} and stops."


def test_a_heading_stands_alone() -> None:
    page = [(72, 700, 16, "A Heading"), (72, 680, 10, f"Then {FILL}"), (72, 668, 10, "it ends.")]
    assert text_of(page) == f"A Heading\n\nThen {FILL} it ends."


def test_columns_that_were_written_row_by_row_are_read_one_after_the_other() -> None:
    left = [f"left line {number} of the first of two columns" for number in range(20)]
    right = [f"right line {number} of the second of the two" for number in range(20)]
    page = [(x, 700 - 12 * row, 10, texts[row]) for row in range(20) for x, texts in ((60, left), (320, right))]
    assert text_of(page) == " ".join([*left, *right])


def test_no_text_and_no_pdf_are_refused() -> None:
    reasons = [
        refusal.reason
        for content in (pdf([]), b"", b"%PDF-1.7 broken")
        for refusal in extract_bytes("pdf", "a.pdf", content)[1]
    ]
    assert reasons == ["no text layer", "damaged pdf", "damaged pdf"]


@pytest.mark.skipif(not (SAMPLES / "philpapers").is_dir(), reason="../shared/raw-samples is not here")
def test_a_real_paper_in_two_columns() -> None:
    found, _ = extract_paths("pdf", SAMPLES / "philpapers" / "N18-3011.pdf")
    text = found[0].text
    assert found[0].meta["title"] == "Construction of the Literature Graph in Semantic Scholar"
    assert "for organizing published scientific literature into a heterogeneous graph to facilitate" in text
    assert "\n\n84\n\n" not in text
    assert "pre-publishing services" in text


@settings(max_examples=40, deadline=None)
@given(mutations(pdf([(72, 700, 10, "Hello there."), (72, 688, 10, "Good bye.")])))
def test_mutated_files_never_raise(content: bytes) -> None:
    parse_without_failure("pdf", content, "x.pdf")
