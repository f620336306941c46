"""DM Mathematics: every answer is right, every question is a pure function, and the wording is the original's."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.core.errors import UsageError
from piledriver.corpus.mathematics.modules import LEVELS, modules_of, question, questions
from piledriver.corpus.mathematics.primes import is_prime, prime_factors
from tests.corpus.mathematics.solving import check
from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths

ALL = [(level, module) for level in LEVELS for module in modules_of(level)]


@pytest.mark.parametrize("module", sorted({module for _, module in ALL}))
def test_answers_are_right(module: str) -> None:
    for level in LEVELS:
        if module in modules_of(level):
            for asked, answer in questions(11, level, module, 0, 6):
                assert check(module, asked, answer), (level, asked, answer)


def test_all_families_of_the_original_are_here() -> None:
    families = {module.partition("__")[0] for _, module in ALL}
    assert families == {
        "algebra", "arithmetic", "calculus", "comparison", "measurement", "numbers", "polynomials", "probability",
    }  # fmt: skip
    assert len(modules_of("train-easy")) == 56
    assert len(modules_of("extrapolate")) == 15


@given(st.sampled_from(ALL), st.integers(0, 10**9), st.integers(0, 10**6))
@settings(max_examples=60)
def test_a_question_is_a_pure_function_of_its_number(place: tuple[str, str], seed: int, number: int) -> None:
    level, module = place
    alone = question(seed, level, module, number)
    assert alone == list(questions(seed, level, module, max(0, number - 2), 3))[min(number, 2)]
    assert all("\n" not in text and text.strip() == text and text for text in alone)


def test_levels_get_harder() -> None:
    def size(level: str) -> float:
        return sum(len(asked) for asked, _ in questions(0, level, "arithmetic__add_or_sub", 0, 300)) / 300

    assert size("train-easy") < size("train-medium") < size("train-hard")


def test_documents_are_cut_after_an_answer() -> None:
    documents, refusals = extract_paths(
        "dm-mathematics", "generate:seed=3,level=train-easy,module=numbers__gcd,count=500"
    )
    assert refusals == []
    assert len(documents) > 2
    lines = [line for document in documents for line in document.text.split("\n")]
    assert lines == [line for pair in questions(3, "train-easy", "numbers__gcd", 0, 500) for line in pair]
    assert all(8192 < len(document.text) < 9000 for document in documents[:-1])
    assert documents[1].meta["module"] == "numbers__gcd"


def test_files_are_read_also_with_doubled_newlines() -> None:
    documents, refusals = extract_bytes(
        "dm-mathematics", "q.txt", b"What is 1 + 1?\n\n2\n\nWhat is 2*3?\n\n6\n\nlost?\n"
    )
    assert [document.text for document in documents] == ["What is 1 + 1?\n2\nWhat is 2*3?\n6"]
    assert [refusal.reason for refusal in refusals] == ["question without answer"]


@pytest.mark.parametrize("settings_text", ["seed=x", "colour=red", "level=hard", "module=nothing"])
def test_wrong_settings_are_said(settings_text: str) -> None:
    with pytest.raises(UsageError):
        extract_paths("dm-mathematics", f"generate:{settings_text}")


@given(st.integers(2, 10**15))
def test_prime_factors_multiply_to_the_number(number: int) -> None:
    factors = prime_factors(number)
    assert all(is_prime(factor) for factor in factors)
    left = number
    for factor in factors:
        assert left % factor == 0
        while left % factor == 0:
            left //= factor
    assert left == 1


def shape(asked: str) -> str:
    """A question without its numbers and letters."""
    asked = re.sub(r"\{[^}]*\}|(?<=replacement from )\w+|(?<=sequence )\w+", "BAG", asked)
    asked = re.sub(r"-?[\da-f]+(?= \(base)", "N", asked)
    asked = re.sub(r"-?\d[\da-f]*(?:\.\d+)?(?:/\d+)?", "N", asked)
    return re.sub(r"\b[a-z]\b", "v", asked)


PLAIN = [
    "arithmetic__add_or_sub", "arithmetic__div", "comparison__kth_biggest", "comparison__sort", "measurement__time",
    "numbers__base_conversion", "numbers__div_remainder", "numbers__gcd", "numbers__list_prime_factors",
    "numbers__place_value", "probability__swr_p_sequence",
]  # fmt: skip


@pytest.mark.skipif(not (SAMPLES / "dm-mathematics").exists(), reason="the shared raw samples are not here")
@pytest.mark.parametrize("module", PLAIN)
def test_the_wording_is_that_of_the_original(module: str) -> None:
    files = list((SAMPLES / "dm-mathematics").glob(f"*/{module}.txt"))
    assert files
    theirs = {shape(line) for file in files for line in file.read_text().splitlines()[::2]}
    ours = {shape(asked) for level in LEVELS[:3] for asked, _ in questions(0, level, module, 0, 700)}
    assert len(theirs & ours) >= 0.95 * len(theirs), sorted(theirs - ours)[:5]


@pytest.mark.skipif(not (SAMPLES / "dm-mathematics").exists(), reason="the shared raw samples are not here")
def test_samples_of_the_original_pass_the_same_checks() -> None:
    documents, refusals = extract_paths("dm-mathematics", SAMPLES / "dm-mathematics")
    assert refusals == []
    for document in documents:
        lines = document.text.split("\n")
        module = document.meta["module"]
        if module in PLAIN:
            assert all(
                check(module, asked, answer) for asked, answer in zip(lines[:20:2], lines[1:20:2], strict=True)
            ), module
