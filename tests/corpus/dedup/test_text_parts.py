"""Parts of documents: evaluation text, paragraphs and byte spans, held against the plainest way to find them."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from piledriver.corpus.dedup.contamination import hash_ngrams, index_ngrams, pieces_around
from piledriver.corpus.dedup.exact import Unit, remove_units, split_units
from piledriver.corpus.dedup.substring import covered_spans, cut_spans, fingerprints, hash_windows, repeated_windows

SPACES = " \t\n  　"
WORDY = st.text(alphabet="aAbBéÉİß." + SPACES, max_size=60)


@given(WORDY, st.integers(1, 4))
def test_sequences_are_what_splitting_says_and_stand_where_they_say(text: str, words: int) -> None:
    hashes, starts, ends = hash_ngrams(text, words)
    split = text.split()
    assert len(hashes) == max(0, len(split) - words + 1)
    for at, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        assert text[start:end].split() == split[at : at + words]


@given(WORDY, WORDY, st.integers(1, 3))
def test_two_texts_meet_where_they_share_words(one: str, two: str, words: int) -> None:
    def grams(text: str) -> list[tuple[str, ...]]:
        # Where lower case has another length (İ), the capital stays.
        split = ["".join(c.lower() if len(c.lower()) == 1 else c for c in word) for word in text.split()]
        return [tuple(split[at : at + words]) for at in range(len(split) - words + 1)]

    known, owners, short = index_ngrams([(7, one)], words)
    hit = np.isin(hash_ngrams(two, words)[0], known).tolist()
    assert hit == [gram in set(grams(one)) for gram in grams(two)]
    assert set(owners.tolist()) <= {7}
    assert short == (not grams(one))


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 100)), max_size=5), st.integers(0, 100))
def test_pieces_are_long_and_far_from_every_hit(hits: list[tuple[int, int]], around: int) -> None:
    spans = [(start, start + size) for start, size in hits]
    pieces = pieces_around(1000, spans, around, shortest=50)
    near_a_hit = {at for start, end in spans for at in range(start - around, end + around)}
    kept = [at for begin, end in pieces for at in range(begin, end)]
    assert not set(kept) & near_a_hit
    assert all(end - begin > 50 for begin, end in pieces)
    assert kept == sorted(set(kept))
    if not spans:
        assert pieces == [(0, 1000)]


@given(st.text(alphabet="ab \n", max_size=60), st.sampled_from(["line", "paragraph"]))
def test_units_join_to_the_text_and_only_repeated_ones_go(text: str, unit: Unit) -> None:
    found = split_units(text, unit, 2)
    assert "".join(part + after for part, after, _ in found) == text
    assert remove_units(text, unit, 2, 0, set()) == (text, 0, sum(hashed is not None for *_, hashed in found))
    compared = [part for part, _, hashed in found if hashed]
    shorter, removed, _ = remove_units(text, unit, 2, 5, {5})
    assert removed == bool(compared)
    left = [part for part, _, hashed in split_units(shorter, unit, 2) if hashed]
    if unit == "line":
        assert left == compared[1:]


def repeated_places(texts: list[bytes], size: int) -> list[int]:
    """Where windows begin that occurred before, as the stage finds them: fingerprints that meet, then whole windows."""
    contents = [np.frombuffer(text, np.uint8) for text in texts]
    begins = [0, *accumulate(map(len, texts))]
    printed = [fingerprints(content, size) for content in contents]
    counts = Counter(value for values, _ in printed for value in values.tolist())
    rows = [np.empty((0, 3), np.uint64)]
    for content, begin, (values, places) in zip(contents, begins, printed, strict=False):
        met = places[[counts[value] > 1 for value in values.tolist()]]
        rows.append(hash_windows(content, size, met) + np.array([0, 0, begin], np.uint64))
    return repeated_windows(np.concatenate(rows), size).tolist()


def compared_with_everything(texts: list[bytes], size: int) -> list[int]:
    """The rule itself: a window is repeated if the same bytes stand before it without overlap."""
    found, begin = [], 0
    first: dict[bytes, int] = {}
    for text in texts:
        for at in range(len(text) - size + 1):
            window = text[at : at + size]
            if first.setdefault(window, begin + at) + size <= begin + at:
                found.append(begin + at)
        begin += len(text)
    return found


# Pieces that come back at any place, in any company, also over each other: what a comparison with one or two earlier
# occurrences would miss.
PIECES = st.sampled_from([b"abcdefgh", b"0123456789", b"xyz", b"aaaaaaaaaaaaaaaaaaaaaa", b"abcdefgh0123456789xy", b"q"])


@given(st.lists(st.lists(PIECES, max_size=12).map(b"".join), max_size=6))
def test_every_repeated_span_is_found_and_nothing_else(texts: list[bytes]) -> None:
    assert repeated_places(texts, 16) == compared_with_everything(texts, 16)


@given(st.lists(st.binary(max_size=120), max_size=3), st.binary(min_size=40, max_size=90), st.data())
def test_a_span_is_found_whatever_stands_around(around: list[bytes], span: bytes, data: st.DataObject) -> None:
    texts = [data.draw(st.binary(max_size=60)) + span + text for text in around]
    assert repeated_places(texts, 40) == compared_with_everything(texts, 40)
    for begin, end in covered_spans(repeated_places(texts, 40), 40):
        assert end - begin >= 40


@given(
    st.text(alphabet="aé漢😀", max_size=40), st.lists(st.tuples(st.integers(0, 120), st.integers(0, 60)), max_size=4)
)
def test_cuts_fall_between_characters(text: str, spans: list[tuple[int, int]]) -> None:
    size = len(text.encode())
    asked = [(begin, min(begin + length, size)) for begin, length in spans if begin < size]
    left, removed = cut_spans(text, asked)
    assert len(left.encode()) + removed == size
    gone = {at for begin, end in asked for at in range(begin, end)}
    at, whole = 0, []
    for character in text:
        width = len(character.encode())
        if not gone >= set(range(at, at + width)):
            whole.append(character)
        at += width
    # Only characters that lie wholly inside one span may go; those across two touching spans may stay.
    kept = iter(left)
    assert all(character in kept for character in whole)


def test_a_text_that_repeats_itself_keeps_its_first() -> None:
    text = "0123456789" * 30
    spans = covered_spans(repeated_places([text.encode()], 100), 100)
    assert spans == [(100, 300)]
    assert cut_spans(text, spans) == ("0123456789" * 10, 200)
