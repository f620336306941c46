"""DM Mathematics: questions and answers that are generated here, or read from files that were generated before."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from typing import Any

from piledriver.core.errors import UsageError
from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.mathematics.modules import LEVELS, modules_of, questions
from piledriver.corpus.raw.lines import bounded_lines
from piledriver.corpus.sources.base import Found, Piece, Source, each, ends_with, whole
from piledriver.corpus.text.normalise import decode

DOCUMENT_CHARACTERS = 8192
BLOCK_QUESTIONS = 2000
LICENCE = "Apache-2.0"

_PLACE = re.compile(r"(?:^|[/!])((?:train-(?:easy|medium|hard)|interpolate|extrapolate))/([a-z0-9_]+)\.txt")
_SETTINGS = ("seed", "level", "module", "count")


def documents(piece: Piece) -> Iterator[Found]:
    """Question, answer, question, answer, cut after an answer when there are about 8192 characters."""
    if piece.extra is not None:
        seed, level, module, first, count = piece.extra
        pairs = questions(seed, level, module, first, count)
        meta = {"level": level, "module": module, "licence": LICENCE, "seed": seed}
        yield from _cut(((str(first + i), *pair) for i, pair in enumerate(pairs)), piece.origin, meta)
        return
    place = _PLACE.search(piece.origin)
    meta = {"licence": LICENCE} | ({"level": place.group(1), "module": place.group(2)} if place else {})
    refused: list[Refusal] = []
    yield from _cut(_pairs(piece, refused), piece.origin, meta)
    yield from refused


def _pairs(piece: Piece, refused: list[Refusal]) -> Iterator[tuple[str, str, str]]:
    """(number, question, answer) of a file; blank lines, which a bug of the original once doubled, are passed over."""
    question: str | None = None
    number = 0
    with piece.open() as opened:
        for line in bounded_lines(opened, piece.origin, 1 << 20):
            if isinstance(line, Refusal):
                refused.append(line)
                continue
            text = decode(line).strip("\r\n")
            if not text.strip():
                continue
            if question is None:
                question = text
            else:
                yield str(number), question, text
                question = None
                number += 1
    if question is not None:
        refused.append(Refusal("question without answer", f"{piece.origin}#{number}", question[:200]))


def _cut(pairs: Iterable[tuple[str, str, str]], origin: str, meta: dict[str, Any]) -> Iterator[Document]:
    lines: list[str] = []
    length, first = 0, "0"
    for number, question, answer in pairs:
        if not lines:
            first = number
        lines += [question, answer]
        length += len(question) + len(answer)
        if length > DOCUMENT_CHARACTERS:
            yield Document("\n".join(lines), meta={"origin": f"{origin}#{first}", **meta})
            lines, length = [], 0
    if lines:
        yield Document("\n".join(lines), meta={"origin": f"{origin}#{first}", **meta})


def generate(settings: dict[str, str]) -> Iterator[Piece]:
    """`generate:seed=7,level=train-easy+train-hard,module=numbers__*,count=10000`: so many questions of each module."""
    for key in settings:
        if key not in _SETTINGS:
            raise UsageError(f"dm-mathematics has no setting {key!r}", fix=f"choose from {', '.join(_SETTINGS)}")
    seed, count = _whole_number(settings, "seed", 0), _whole_number(settings, "count", 1000)
    wanted = settings.get("level", "train-easy+train-medium+train-hard")
    levels = LEVELS if wanted == "all" else tuple(wanted.split("+"))
    patterns = settings.get("module", "*").split("+")
    chosen = [
        (level, name)
        for level in levels
        for name in modules_of(level)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if not chosen:
        raise UsageError(f"no module is called {settings.get('module')!r}", fix="try numbers__* or algebra__linear_1d")
    for level, name in chosen:
        for first in range(0, count, BLOCK_QUESTIONS):
            block = min(BLOCK_QUESTIONS, count - first)
            yield Piece(f"generate:{seed}/{level}/{name}", length=60 * block, extra=(seed, level, name, first, block))


def _whole_number(settings: dict[str, str], key: str, default: int) -> int:
    text = settings.get(key, str(default))
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{key}={text} is not a whole number", fix=f"write {key}={default}")
    return int(text)


SOURCE = Source(
    slug="dm-mathematics",
    name="DM Mathematics",
    title="questions and answers of school mathematics",
    raw_format="generate:seed=0,level=train-easy,module=*,count=1000; or the text files of mathematics_dataset",
    licence=LICENCE,
    consent="author",
    treatment=(
        "Written anew after DeepMind's mathematics_dataset: all its modules of algebra, arithmetic, calculus, "
        "comparison, measurement, numbers, polynomials and probability, with its names, wording and levels "
        "(train-easy, train-medium, train-hard, interpolate, extrapolate), and exact answers. The same kind of "
        "questions, not the same questions: the numbers are drawn differently. Question k of a module at a level "
        "is a pure function of the seed and k. Files that were generated before are read as they are, also with "
        "the blank lines that a bug of the original once put between all others. A document is consecutive "
        "questions of one module, cut after an answer beyond 8192 characters."
    ),
    citation="Saxton et al., Analysing Mathematical Reasoning Abilities of Neural Models, ICLR 2019",
    wants=ends_with(".txt"),
    pieces=each(whole),
    documents=documents,
    generate=generate,
)
