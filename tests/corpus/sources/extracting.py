"""Run the real extraction in this process on bytes or paths, for the tests of the sources."""

from __future__ import annotations

import tempfile
from pathlib import Path

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.extraction import extract_files
from piledriver.corpus.sources import SOURCES

SAMPLES = Path(__file__).resolve().parents[4] / "shared" / "raw-samples"


def extract_bytes(slug: str, name: str, content: bytes) -> tuple[list[Document], list[Refusal]]:
    """Write one raw file and extract it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        return extract_paths(slug, path)


def extract_paths(slug: str, *paths: Path | str) -> tuple[list[Document], list[Refusal]]:
    """Extract files and folders."""
    found = list(extract_files(SOURCES[slug], [str(path) for path in paths]))
    return [item for item in found if isinstance(item, Document)], [item for item in found if isinstance(item, Refusal)]
