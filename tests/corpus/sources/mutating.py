"""Valid raw input with parts cut out, doubled or replaced by junk: what the fuzz tests feed to the parsers."""

from __future__ import annotations

from hypothesis import strategies as st

from piledriver.corpus.document import Document
from piledriver.corpus.extraction import extract_piece
from piledriver.corpus.sources import SOURCES
from piledriver.corpus.sources.base import Piece


def mutations(valid: bytes) -> st.SearchStrategy[bytes]:
    """Some edits of a valid file, or bytes that were never one."""

    @st.composite
    def edited(draw: st.DrawFn) -> bytes:
        content = valid
        for _ in range(draw(st.integers(1, 3))):
            at = draw(st.integers(0, len(content)))
            end = min(len(content), at + draw(st.integers(0, 40)))
            kind = draw(st.sampled_from(("cut", "double", "junk")))
            middle = b"" if kind == "cut" else content[at:end] * 2 if kind == "double" else draw(st.binary(max_size=12))
            content = content[:at] + middle + content[end:]
        return content

    return edited() | st.binary(max_size=200)


def parse_without_failure(slug: str, content: bytes, name: str = "x") -> list[str]:
    """The texts that a source finds in a piece; damage it may refuse, but its parser must not fail."""
    found = list(extract_piece(SOURCES[slug], Piece(name, data=content)))
    assert not [item for item in found if not isinstance(item, Document) and item.reason == "parser failed"]
    return [item.text for item in found if isinstance(item, Document)]
