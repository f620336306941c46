"""What a source compiles for much data changes its speed, never its text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from piledriver.corpus.formats.html.fast.convert import compiled, in_use
from piledriver.corpus.formats.xml import unescape as xml_unescape
from piledriver.corpus.sources import SOURCES
from piledriver.corpus.sources.table import BUILT_IN
from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths

PREPARED = [slug for slug in BUILT_IN if SOURCES[slug].prepare is not None]
POSTS = b"""<posts>
<row Id="1" PostTypeId="1" AcceptedAnswerId="2" Score="1" Title="A &amp;amp; B" Body="\
&lt;p&gt;x&lt;sub&gt;1&lt;/sub&gt;\
&#xA;&amp;eacute; &#233;&lt;/p&gt;" />
<row Id="2" PostTypeId="2" ParentId="1" Score="4" Body="&lt;ul&gt;&lt;li&gt;y&lt;/li&gt;&lt;/ul&gt;" />
</posts>"""


@pytest.fixture(autouse=True)
def afterwards_as_before() -> Iterator[None]:
    yield
    compiled(False)


def test_posts_read_alike() -> None:
    prepare = SOURCES["stackexchange"].prepare
    assert prepare is not None
    prepare(True)
    assert in_use()
    fast = extract_bytes("stackexchange", "Posts.xml", POSTS)
    prepare(False)
    assert not in_use()
    assert extract_bytes("stackexchange", "Posts.xml", POSTS) == fast
    assert fast[0][0].text == "Q:\n\nA & B\n\nx₁ é é\n\nA:\n\n- y"


@pytest.mark.parametrize(
    "value", [b"&lt;", b"&amp;lt;", b"a&#xA;b", b"&", b"&lt", b"&#233;", b"&unknown;", b"&apos;&#xD;"]
)
def test_entities_read_alike(value: bytes) -> None:
    long = 300 * b"x" + value
    compiled()
    fast = xml_unescape.unescaped(long)
    compiled(False)
    assert xml_unescape.unescaped(long) == fast


@pytest.mark.parametrize("slug", PREPARED)
def test_samples_read_alike(slug: str) -> None:
    folder = SAMPLES / {"epub": "books3", "mail": "enron-emails"}.get(slug, slug)
    if not Path(folder).exists():
        pytest.skip(f"{folder.name} is not among ../shared/raw-samples")
    prepare = SOURCES[slug].prepare
    assert prepare is not None
    prepare(True)
    fast = extract_paths(slug, folder)
    prepare(False)
    assert extract_paths(slug, folder) == fast
