"""Parts of documents: evaluation text, paragraphs and byte spans, held against the plainest way to find them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from piledriver.corpus.dedup.contamination import index, pieces_around, sequences
from piledriver.corpus.dedup.paragraphs import ParagraphSettings, units, without
from piledriver.corpus.dedup.substring import as_bytes, cut, fingerprints, shared_span

SPACES = " \t\n  　"
WORDY = st.text(alphabet="aAbBéÉİß." + SPACES, max_size=60)


@given(WORDY, st.integers(1, 4))
def test_sequences_are_what_splitting_says_and_stand_where_they_say(text: str, words: int) -> None:
    hashes, starts, ends = sequences(text, words)
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

    known, owners, short = index([(7, one)], words)
    hit = np.isin(sequences(two, words)[0], known).tolist()
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
def test_units_join_to_the_text_and_only_repeated_ones_go(text: str, unit: str) -> None:
    settings = ParagraphSettings(unit=unit, min_characters=2)  # type: ignore[arg-type]
    found = units(text, settings)
    assert "".join(part + after for part, after, _ in found) == text
    assert without(text, settings, 0, set()) == (text, 0, sum(hashed is not None for *_, hashed in found))
    compared = [part for part, _, hashed in found if hashed]
    shorter, removed, _ = without(text, settings, 5, {5})
    assert removed == bool(compared)
    left = [part for part, _, hashed in units(shorter, settings) if hashed]
    if unit == "line":
        assert left == compared[1:]


@given(st.binary(max_size=300), st.binary(max_size=300), st.binary(min_size=40, max_size=200), st.binary(max_size=300))
def test_a_shared_span_has_a_shared_fingerprint(before: bytes, after: bytes, span: bytes, other: bytes) -> None:
    """Winnowing's promise: whatever stands around, a span of min_bytes is met."""
    one = np.frombuffer(before + span + after, np.uint8)
    two = np.frombuffer(other + span, np.uint8)
    (first, first_at), (second, second_at) = fingerprints(one, 40), fingerprints(two, 40)
    shared = set(first.tolist()) & set(second.tolist())
    assert shared
    # At least one of the meetings grows, by comparing bytes, to a span of that size.
    grown = [
        shared_span(two, int(at), one, int(place), False)
        for at, hashed in zip(second_at, second, strict=True)
        for place in first_at[first == hashed]
    ]
    assert max(end - begin for begin, end in grown) >= len(span)
    for at, hashed in zip(second_at, second, strict=True):
        for place in first_at[first == hashed]:
            begin, end = shared_span(two, int(at), one, int(place), False)
            shift = int(place) - int(at)
            assert bytes(two[begin:end]) == bytes(one[begin + shift : end + shift])


@given(
    st.text(alphabet="aé漢😀", max_size=40), st.lists(st.tuples(st.integers(0, 120), st.integers(0, 60)), max_size=4)
)
def test_cuts_fall_between_characters(text: str, spans: list[tuple[int, int]]) -> None:
    size = len(text.encode())
    asked = [(begin, min(begin + length, size)) for begin, length in spans if begin < size]
    left, removed = cut(text, asked)
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
    content = as_bytes("0123456789" * 30)
    begin, end = shared_span(content, 150, content, 0, True)
    assert (begin, end) == (150, 300)
    assert shared_span(content, 20, content, 0, True) == (20, 40)
