"""Compiled parsers change the speed of a source, never its output."""

from __future__ import annotations

from pathlib import Path

import pytest

from piledriver.corpus.extraction import extract_files
from piledriver.corpus.sources import SOURCES
from piledriver.corpus.sources.base import COMPILE_FROM_BYTES, Found
from piledriver.corpus.sources.table import BUILT_IN
from tests.corpus.sources.extracting import SAMPLES

COMPILED = [slug for slug in BUILT_IN if SOURCES[slug].compile is not None]
POSTS = b"""<posts>
<row Id="1" PostTypeId="1" AcceptedAnswerId="2" Score="1" Title="A &amp;amp; B" Body="\
&lt;p&gt;x&lt;sub&gt;1&lt;/sub&gt;\
&#xA;&amp;eacute; &#233;&lt;/p&gt;" />
<row Id="2" PostTypeId="2" ParentId="1" Score="4" Body="&lt;ul&gt;&lt;li&gt;y&lt;/li&gt;&lt;/ul&gt;" />
</posts>"""


def found(slug: str, path: Path, raw_bytes: int) -> list[Found]:
    return list(extract_files(SOURCES[slug].prepared(raw_bytes), [str(path)]))


def test_only_large_inputs_are_compiled_for() -> None:
    source = SOURCES["stackexchange"]
    assert source.prepared(COMPILE_FROM_BYTES - 1) is source
    assert source.prepared(COMPILE_FROM_BYTES).documents is not source.documents
    assert SOURCES["text"].prepared(COMPILE_FROM_BYTES) is SOURCES["text"]


def test_posts_are_read_alike(tmp_path: Path) -> None:
    (tmp_path / "Posts.xml").write_bytes(POSTS)
    plain, compiled = (found("stackexchange", tmp_path, size) for size in (0, COMPILE_FROM_BYTES))
    assert plain == compiled
    assert plain[0].text == "Q:\n\nA & B\n\nx₁ é é\n\nA:\n\n- y"  # type: ignore[union-attr]


@pytest.mark.parametrize("slug", COMPILED)
def test_samples_are_read_alike(slug: str) -> None:
    folder = SAMPLES / {"epub": "books3"}.get(slug, slug)
    if not folder.exists():
        pytest.skip(f"{folder.name} is not among ../shared/raw-samples")
    assert found(slug, folder, 0) == found(slug, folder, COMPILE_FROM_BYTES)
