"""Texts for the corpus benchmarks: pieces of about 5.4 KB of the code and documentation that Python comes with."""

from __future__ import annotations

import site
import sysconfig
from collections.abc import Iterator
from pathlib import Path

PIECE = 5400
SUFFIXES = (".py", ".pyi", ".txt", ".md", ".rst", ".h")


def pieces() -> Iterator[str]:
    """Texts in a fixed order, none of them shorter than 4,000 characters, no two equal."""
    seen: set[int] = set()
    for root in [sysconfig.get_paths()["stdlib"], *site.getsitepackages()]:
        for path in sorted(Path(root).rglob("*")):
            if path.suffix not in SUFFIXES or not path.is_file():
                continue
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            for at in range(0, len(text), PIECE):
                piece = text[at : at + PIECE]
                if len(piece) >= 4000 and hash(piece) not in seen:
                    seen.add(hash(piece))
                    yield piece
