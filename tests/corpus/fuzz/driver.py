"""Mutate the seeds of a source for some time or number of cases, and say what broke the law.

    python -m tests.corpus.fuzz.driver --seconds 600 --keep FOLDER [SLUG ...]

writes each input that broke the law, made small, to `FOLDER/<slug>/<number>/`; move what shows a fault of its own to
`findings/` with a name that says what it is.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.corpus.fuzz.law import BrokenLawError, Raw, hold
from tests.corpus.fuzz.mutate import mutated
from tests.corpus.fuzz.seeds import seeds

SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "raw-samples"
_LARGEST_SAMPLE = 120_000


@dataclass
class Outcome:
    """What came of one source's run."""

    cases: int = 0
    broken: dict[str, Raw] = field(default_factory=dict)
    """The first input for each message."""


def cases(slug: str, raws: list[Raw], luck: random.Random) -> Iterator[Raw]:
    """One mutated input after the other, without end."""
    contents = [content for raw in raws for content in raw.values()]
    while True:
        raw = dict(luck.choice(raws))
        name = luck.choice(list(raw))
        raw[name] = mutated(luck, raw[name], luck.choice(contents))
        if len(raw[name]) < 4_000_000:
            yield raw


def run(slug: str, raws: list[Raw], luck: random.Random, more: Callable[[int], bool]) -> Outcome:
    """Cases until `more` says that it is enough."""
    outcome = Outcome()
    for raw in cases(slug, raws, luck):
        if not more(outcome.cases):
            return outcome
        outcome.cases += 1
        try:
            hold(slug, raw)
        except BrokenLawError as error:
            outcome.broken.setdefault(kind(error), raw)
    return outcome


def kind(error: BaseException) -> str:
    """The message without what differs from case to case, and where it was raised."""
    cause = error.__cause__
    place = ""
    while cause is not None and cause.__traceback__ is not None:
        trace = cause.__traceback__
        while trace.tb_next is not None:
            trace = trace.tb_next
        place = f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        cause = cause.__cause__
    return "".join("#" if letter.isdigit() else letter for letter in str(error))[:70] + place


def smaller(slug: str, raw: Raw, message: str, seconds: float = 20) -> Raw:
    """The same fault from less: parts are left out as long as it stays."""

    def fails(candidate: Raw) -> bool:
        try:
            hold(slug, candidate)
        except BrokenLawError as error:
            return kind(error) == message
        return False

    stop = time.monotonic() + seconds
    for name in list(raw):
        without = {other: content for other, content in raw.items() if other != name}
        if without and fails(without):
            raw = without
    for name in raw:
        step = len(raw[name]) // 2
        while step and time.monotonic() < stop:
            at = 0
            while at < len(raw[name]) and time.monotonic() < stop:
                shorter = {**raw, name: raw[name][:at] + raw[name][at + step :]}
                if fails(shorter):
                    raw = shorter
                else:
                    at += step
            step //= 2
    return raw


def with_samples(slug: str, raws: list[Raw]) -> list[Raw]:
    """The seeds, and the small ones of the real files where they are."""
    folder = SAMPLES / slug
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()] if folder.exists() else []
    small = [path for path in found if path.stat().st_size <= _LARGEST_SAMPLE][:40]
    return raws + [{str(path.relative_to(folder)): path.read_bytes()} for path in small]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("slugs", nargs="*")
    parser.add_argument("--seconds", type=float, default=60, help="in all, divided among the sources")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, required=True)
    arguments = parser.parse_args()
    every = seeds()
    slugs = arguments.slugs or list(every)
    for slug in slugs:
        stop = time.monotonic() + arguments.seconds / len(slugs)
        raws = with_samples(slug, every[slug])
        luck = random.Random(f"{slug} {arguments.seed}")
        outcome = run(slug, raws, luck, lambda _, stop=stop: time.monotonic() < stop)  # type: ignore[misc]
        for number, (message, raw) in enumerate(outcome.broken.items()):
            for name, content in smaller(slug, raw, message).items():
                path = arguments.keep / slug / f"{arguments.seed}-{number}" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
        print(json.dumps({"source": slug, "cases": outcome.cases, "broken": list(outcome.broken)}), flush=True)


if __name__ == "__main__":
    main()
