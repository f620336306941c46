"""The same law under coverage guidance: `python -m tests.corpus.fuzz.guided SLUG -max_total_time=600`.

Wants atheris, which this project does not: install it into an environment of its own beside the package. Inputs are the
seeds of the source, each with the number of the seed and of its file in front; the mutator is ours, which knows
archives and markup, in turns with libFuzzer's.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> None:
    """The command; what breaks the law is written to the working folder by libFuzzer and printed as raw files."""
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    slug = sys.argv.pop(1)
    # What numba compiles it must see as it was written.
    compiled = [
        "piledriver.corpus.formats.html.fast.scan",
        "piledriver.corpus.formats.html.fast.lines",
        "piledriver.corpus.formats.xml.unescape",
    ]
    with atheris.instrument_imports(include=["piledriver.corpus"], exclude=compiled):
        from piledriver.corpus.sources import SOURCES
        from piledriver.corpus.sources.base import COMPILE_FROM_BYTES
        from tests.corpus.fuzz.law import BrokenLawError, Raw, hold
        from tests.corpus.fuzz.mutate import mutated
        from tests.corpus.fuzz.seeds import seeds

        # Its module is imported when it is asked for: here, to be instrumented.
        source = SOURCES[slug]
    raws: list[Raw] = seeds()[slug]
    source.prepared(COMPILE_FROM_BYTES)
    contents = [content for raw in raws for content in raw.values()]

    def decoded(data: bytes) -> Raw:
        raw = dict(raws[data[0] % len(raws)])
        names = list(raw)
        return {**raw, names[data[1] % len(names)]: data[2:]}

    def mutator(data: bytes, most: int, seed: int) -> bytes:
        luck = random.Random(seed)
        if len(data) < 2 or luck.random() < 0.3:
            return bytes(atheris.Mutate(data, most))
        return (data[:2] + mutated(luck, data[2:], luck.choice(contents)))[:most]

    def one(data: bytes) -> None:
        if len(data) < 2:
            return
        try:
            hold(slug, decoded(data))
        except BrokenLawError as error:
            raise RuntimeError(f"{slug}: {error}") from error

    with tempfile.TemporaryDirectory() as corpus:
        for number, raw in enumerate(raws):
            for place, content in enumerate(raw.values()):
                (Path(corpus) / f"{number}-{place}").write_bytes(bytes([number, place]) + content)
        options: list[Any] = [
            sys.argv[0],
            corpus,
            "-max_len=60000",
            "-timeout=120",
            "-rss_limit_mb=8000",
            *sys.argv[1:],
        ]
        atheris.Setup(options, one, custom_mutator=mutator)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
