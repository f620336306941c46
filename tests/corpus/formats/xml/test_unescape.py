from __future__ import annotations

import pytest

from piledriver.corpus.formats.xml.unescape import unescape


@pytest.mark.parametrize(
    "value", [b"&lt;", b"&amp;lt;", b"a&#xA;b", b"&", b"&lt", b"&#233;", b"&unknown;", b"&apos;&#xD;"]
)
def test_compiled_code_reads_entities_alike(value: bytes) -> None:
    long = 300 * b"x" + value
    assert unescape(long, compiled=True) == unescape(long)
