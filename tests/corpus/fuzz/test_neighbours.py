"""One bad record among good ones: the others still come, whole, and nothing of the bad one leaks into them."""

from __future__ import annotations

import pytest

from tests.corpus.sources import test_pile_cc
from tests.corpus.sources.extracting import extract_bytes
from tests.corpus.sources.test_truncated import RECORDS, STREAMS, begun, marks

PAGES = [
    test_pile_cc.record(f"<p>mark{number:03d} {test_pile_cc.PROSE} ended{number:03d}</p>".encode())
    for number in range(RECORDS)
]
FILES = {**STREAMS, ("pile-cc", "a.warc"): PAGES}
BAD = 7
JUNK = {
    "nul": b"\x00",
    "control character": b"\x1b",
    "no utf-8": b"\xff\xfe\xed\xa0\x80",
    "tag": b"<",
    "opened tag": b"<b>",
    "closed tag": b"</b>",
    "entity": b"&",
    "unknown entity": b"&nosuch;",
    "character that is none": b"&#x110000;&#0;",
    "end of a section": b"]]>",
    "section": b"<![CDATA[",
    "comment": b"<!-- ",
    "instruction": b"<?x ",
    "quote": b'"',
    "backslash": b"\\",
    "line break": b"\n",
    "carriage return": b"\r",
    "braces": b"{{[[{|",
    "long": b"x" * 300_000,
}


@pytest.mark.parametrize(("slug", "name"), FILES)
def test_the_neighbours_of_a_bad_record_come(slug: str, name: str) -> None:
    records = FILES[slug, name]
    for junk in JUNK.values():
        at = len(records[BAD]) // 2
        bad = records[BAD][:at] + junk + records[BAD][at:]
        content = b"".join([*records[:BAD], bad, *records[BAD + 1 :]])
        documents, refusals = extract_bytes(slug, name, content)
        texts = [document.text for document in documents]
        others = {f"{number:03d}" for number in range(RECORDS)} - {f"{BAD:03d}"}
        assert others <= set().union(*map(marks, texts)), junk[:20]
        assert all(len(begun(text)) == 1 for text in texts), junk[:20]
        assert refusals or f"{BAD:03d}" in set().union(*map(begun, texts)), junk[:20]
