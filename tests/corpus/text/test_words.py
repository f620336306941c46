"""What a word is: between white space, a character where there are none, or a token of a linguistic tokenizer."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from piledriver.corpus.text.words import LETTER, SIGN, UNSPACED, scan_tokens, scan_words

# Without the scripts that have no spaces, and their punctuation.
SPACED = st.characters(exclude_categories=["Cs"], max_codepoint=0x0DFF) | st.sampled_from("\u2003\u2028\u205f—…한글ﬁ😀")


def hashes(text: str) -> list[int]:
    found: list[int] = scan_words(text)[0].tolist()
    return found


@given(st.text(SPACED) | st.text(alphabet="aB9_' .,\n\u00a0\u0085\x1cé—한"))
def test_words_are_those_between_white_space(text: str) -> None:
    found, lengths, _ = scan_words(text)
    words = text.split()
    assert lengths.tolist() == [len(word) for word in words]
    assert found.tolist() == [hashes(word)[0] for word in words]


@given(st.text())
def test_nothing_visible_is_lost_and_no_word_is_empty(text: str) -> None:
    found, lengths, _ = scan_words(text)
    assert len(found) == len(lengths)
    assert (lengths > 0).all()
    assert lengths.sum() <= sum(not character.isspace() for character in text)


def test_case_and_kinds() -> None:
    assert hashes("THE end") == hashes("the END")
    assert hashes("end") != hashes("end,")
    assert scan_words("It's 3.5 — naïve é")[2].tolist() == [LETTER, SIGN, SIGN, LETTER, LETTER]


def test_scripts_without_spaces_have_a_word_for_each_character() -> None:
    for text in ("東京は", "ภาษาไทย", "ພາສາລາວ", "ភាសាខ្មែរ", "မြန်မာ", "\U00020000\U00020001"):
        _, lengths, kinds = scan_words(f"in {text}。then")
        assert kinds.tolist() == [LETTER, *[UNSPACED] * len(text), LETTER], text
        assert lengths.tolist() == [2, *[1] * len(text), 4]
    assert len(hashes("한국어는 띄어쓰기를 한다")) == 3


def test_tokens_are_words_numbers_and_signs() -> None:
    assert len(scan_tokens("It's 3.5 km — naïve\u00a0café…")) == 9
    assert len(scan_tokens("東京は good")) == 4
    assert len(scan_tokens(" \n\t")) == 0
    assert scan_tokens("THE end").tolist() == scan_tokens("the END").tolist()


@given(st.text(alphabet="aB9_' .,\n\u00a0é—"))
def test_tokens_of_a_text(text: str) -> None:
    assert len(scan_tokens(text)) == len(re.findall(r"[\w']+|[^\w'\s]", text))
