"""Each rule, on the smallest text that shows it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piledriver.corpus.document import Document
from piledriver.corpus.filters import FILTERS, Drop
from piledriver.corpus.filters.c4 import C4
from piledriver.corpus.filters.fineweb import FineWeb
from piledriver.corpus.filters.gopher import GopherQuality, GopherRepetition
from piledriver.corpus.filters.length import Length

PARTS = [("old", "house", "town"), ("red", "river", "valley"), ("long", "road", "hills"), ("white", "tower", "coast")]
PROSE = " ".join(
    f"The {a} {b} that the people of the {c} have with them was to be seen by all who came there." for a, b, c in PARTS
)


def reason(verdict: Document | Drop) -> str:
    return verdict.reason if isinstance(verdict, Drop) else "kept"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PROSE, "kept"),
        ("The short one.", "gopher: too few words"),
        ("a b c d e f g h i j " * 10, "gopher: mean word length"),
        (PROSE + " #tagged" * 40, "gopher: too many hash signs"),
        (PROSE + " ..." * 20, "gopher: too many ellipses"),
        ("\n".join(f"- {line}" for line in PROSE.split(".")), "gopher: too many bullet lines"),
        ("\n".join(f"{line}…" for line in PROSE.split(".")[:4]), "gopher: too many lines end in an ellipsis"),
        (PROSE + " 12 34 56 78" * 10, "gopher: too few words with letters"),
        ("Lorem ipsum dolor sit amet consectetur " * 15, "gopher: too few stop words"),
    ],
)
def test_gopher_quality(text: str, expected: str) -> None:
    assert reason(GopherQuality()(Document(text))) == expected


NOVEL = """
"Well!" thought Alice to herself, "after such a fall as this, I shall think nothing of tumbling down stairs! How brave
they'll all think me at home! Why, I wouldn't say anything about it, even if I fell off the top of the house!" (Which
was very likely true.) Down, down, down. Would the fall never come to an end? "I wonder how many miles I've fallen by
this time?" she said aloud. "I must be getting somewhere near the centre of the earth. Let me see: that would be four
thousand miles down, I think--" (for, you see, Alice had learnt several things of this sort, and so on)."""


def test_gopher_counts_words_between_spaces_as_its_paper_does() -> None:
    """Novels have a sign for every fourth word: counted as words, signs would fail the share of words with letters."""
    assert reason(GopherQuality()(Document(NOVEL))) == "kept"
    signs = " ".join(f"word {sign}" for sign in "+-*/=<>|&%" * 6)
    assert reason(GopherQuality(min_stop_words=0, min_mean_word_length=1)(Document(signs))) != "kept"


@pytest.mark.parametrize(
    "text",
    ["เราเดินทางไปตลาดแต่เช้าเพื่อซื้อผลไม้สดและผักนานาชนิด", "我们一大早就去市场买新鲜水果和各种蔬菜然后回家做饭给孩子们吃。"],
)
def test_scripts_without_spaces_have_words_too(text: str) -> None:
    judge = GopherQuality(min_stop_words=0)
    assert reason(judge(Document(text * 4))) == "kept"
    assert reason(judge(Document(text[:15]))) == "gopher: too few words"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PROSE, "gopher: most frequent 4-gram"),
        (" ".join(f"word{i % 90}" for i in range(120)), "gopher: repeated 5-grams"),
        (" ".join(f"word{i}" for i in range(300)), "kept"),
        ("same line here\n" * 10, "gopher: duplicate lines"),
        (
            "\n".join([*(f"l{i}" for i in range(10)), "a very long line " * 20, "a very long line " * 20]),
            "gopher: characters in duplicate lines",
        ),
        ("spam eggs " * 3 + " ".join(f"w{i}" for i in range(20)), "gopher: most frequent 2-gram"),
    ],
)
def test_gopher_repetition(text: str, expected: str) -> None:
    assert reason(GopherRepetition()(Document(text))) == expected


def test_c4_keeps_sentences_and_drops_what_is_not_prose() -> None:
    sentences = "\n".join(f"This is sentence number {i} of the page." for i in range(6))
    kept = C4()(
        Document(f"Menu\n{sentences}\nPlease enable JavaScript to see this.\nWe use cookies on this site.\nno end here")
    )
    assert isinstance(kept, Document)
    assert kept.text == sentences
    assert reason(C4()(Document("One. Two."))) == "c4: too few sentences"
    assert reason(C4()(Document(sentences + " {"))) == "c4: curly bracket"
    assert reason(C4()(Document(sentences + " Lorem Ipsum dolor."))) == "c4: lorem ipsum"
    cited = C4()(Document("It was so long ago [12] and far away [citation needed].\n" + sentences))
    assert isinstance(cited, Document)
    assert "[" not in cited.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n".join(f"Here is a line of running text, the number {i} of them." for i in range(5)), "kept"),
        (
            "\n".join(f"a long line of words without an end number {i}" for i in range(9)),
            "fineweb: lines without end punctuation",
        ),
        ("\n".join(f"short {i}." for i in range(9)), "fineweb: short lines"),
        (
            "A whole line that is said twice, no less.\n" * 2 + "Another line that is said only once here.",
            "fineweb: duplicate lines",
        ),
        (
            "\n".join("Incomprehensibilities-antidisestablishmentarianism" + chr(97 + i) + "." for i in range(9)),
            "fineweb: more lines than words allow",
        ),
    ],
)
def test_fineweb(text: str, expected: str) -> None:
    verdict = FineWeb(max_lines_per_word=0.1 if "more lines" in expected else 0.3)(Document(text))
    assert reason(verdict) == expected


def test_length() -> None:
    assert reason(Length(min_characters=3, max_characters=5)(Document("ab"))) == "too short"
    assert reason(Length(min_characters=3, max_characters=5)(Document("abcdef"))) == "too long"
    assert reason(Length(min_characters=3, max_characters=5)(Document("abcd"))) == "kept"


@given(st.text(max_size=500))
def test_no_text_breaks_a_filter(text: str) -> None:
    for name in ("length", "gopher-quality", "gopher-repetition", "c4", "fineweb"):
        verdict = FILTERS[name]()(Document(text))
        assert isinstance(verdict, (Document, Drop))
