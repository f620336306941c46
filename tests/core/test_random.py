from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from piledriver.core.permutation import Permutation
from piledriver.core.random import Stream, philox4x32

# The known answers of the Random123 distribution (kat_vectors, philox4x32-10).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_numbers(counter: tuple[int, ...], key: tuple[int, int], expected: str) -> None:
    c0, c1, c2, c3 = (np.array([word], np.uint64) for word in counter)
    assert " ".join(f"{int(word[0]):08x}" for word in philox4x32((c0, c1, c2, c3), key)) == expected


def test_the_numbers_of_a_stream_are_fixed_for_ever() -> None:
    stream = Stream(42, "shuffle").child("epoch", 3)
    assert [int(bits) for bits in stream.bits(np.array([0, 1, 2**40]))] == [
        15923900375271870847,
        7972643506972846943,
        6258764289368215308,
    ]


@given(seed=st.integers(), indices=st.lists(st.integers(0, 2**63), min_size=1, max_size=50))
def test_a_number_depends_on_its_index_alone(seed: int, indices: list[int]) -> None:
    stream = Stream(seed, "law")
    together = stream.bits(np.array(indices, np.uint64))
    alone = [stream.bits(np.array([index], np.uint64))[0] for index in indices]
    assert list(together) == alone


def test_names_seeds_and_children_make_different_streams() -> None:
    streams = [
        Stream(0, "a"),
        Stream(1, "a"),
        Stream(0, "b"),
        Stream(0, "a", "b"),
        Stream(0, "ab"),
        Stream(0, 1),
        Stream(0, "1"),
    ]
    streams += [Stream(0, "a").child(i) for i in range(100)]
    assert len({int(stream.bits(0)[0]) for stream in streams}) == len(streams)


def test_numbers_are_spread_evenly() -> None:
    values = Stream(3, "even").uniforms(np.arange(100_000))
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    chi_square = float(((counts - 1000.0) ** 2 / 1000.0).sum())
    assert 50 < chi_square < 160, "99 degrees of freedom"
    assert {Stream(3, "die").below(6, i) for i in range(200)} == set(range(6))


@given(length=st.integers(1, 3000), seed=st.integers(0, 2**64))
def test_a_permutation_is_a_bijection_with_its_inverse(length: int, seed: int) -> None:
    order = Permutation(length, Stream(seed, "law"))
    items = order.at(np.arange(length))
    assert sorted(items.tolist()) == list(range(length))
    assert order.positions(items).tolist() == list(range(length))


@given(length=st.integers(2**33, 2**61), index=st.integers(0, 2**33 - 1))
def test_huge_permutations_cost_nothing_and_invert(length: int, index: int) -> None:
    order = Permutation(length, Stream(1, "huge"))
    assert order.inverse(order(index)) == index
    with pytest.raises(IndexError):
        order(length)


def test_every_item_comes_first_about_equally_often() -> None:
    length = 16
    firsts = np.bincount([Permutation(length, Stream(seed, "fair"))(0) for seed in range(3200)], minlength=length)
    chi_square = float(((firsts - 200.0) ** 2 / 200.0).sum())
    assert chi_square < 40, firsts


def test_shuffled_lists_keep_their_items() -> None:
    items = list(range(1000))
    mixed = Stream(5, "list").shuffled(items)
    assert sorted(mixed) == items
    assert mixed != items
