"""Every source under mutation, some cases each; `FUZZ_SECONDS=600 pytest tests/corpus/fuzz` for longer, by other luck.

What ever broke the law is kept in `findings/<slug>/<what it was>/`, as small as it could be made, and tried each time.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.corpus.fuzz.blow_up import swollen
from tests.corpus.fuzz.driver import run
from tests.corpus.fuzz.law import BrokenLawError, Raw, hold
from tests.corpus.fuzz.seeds import seeds
from tests.corpus.sources.test_hostile import NAMES

CASES = 25
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
FINDINGS = sorted(path for path in (Path(__file__).parent / "findings").glob("*/*") if path.is_dir())


@pytest.fixture(scope="module")
def every() -> dict[str, list[Raw]]:
    """The seeds, which take a second to make."""
    return seeds()


def test_every_source_has_seeds(every: dict[str, list[Raw]]) -> None:
    assert set(every) == set(NAMES)


@pytest.mark.parametrize("slug", NAMES)
def test_the_law_holds_for_mutated_input(slug: str, every: dict[str, list[Raw]]) -> None:
    stop = time.monotonic() + SECONDS / len(NAMES)
    luck = random.Random(f"{slug} {time.time_ns() if SECONDS else 0}")
    outcome = run(slug, every[slug], luck, lambda cases: cases < CASES or time.monotonic() < stop)
    assert outcome.cases >= CASES
    assert outcome.broken == {}


@pytest.mark.parametrize("slug", NAMES)
def test_markup_that_is_repeated_takes_no_longer_than_its_size(slug: str, every: dict[str, list[Raw]]) -> None:
    inputs = list(swollen(every[slug][0], 400_000 if SECONDS else 50_000))
    for token, raw in inputs if SECONDS else random.Random(slug).sample(inputs, min(4, len(inputs))):
        try:
            hold(slug, raw)
        except BrokenLawError as error:
            pytest.fail(f"{token!r}: {error}")


@pytest.mark.parametrize("slug", NAMES)
def test_valid_input_gives_something(slug: str, every: dict[str, list[Raw]]) -> None:
    # The mutations of what is refused from the start would prove little.
    assert all(hold(slug, raw) for raw in every[slug])


@pytest.mark.parametrize("finding", FINDINGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_was_found_stays_mended(finding: Path) -> None:
    raw = {str(path.relative_to(finding)): path.read_bytes() for path in finding.rglob("*") if path.is_file()}
    try:
        hold(finding.parent.name, raw)
    except BrokenLawError as error:
        pytest.fail(f"{finding}: {error}")
