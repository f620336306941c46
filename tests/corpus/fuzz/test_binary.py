"""Binary content never becomes a document, whatever its name, and is counted as rejected with a reason."""

from __future__ import annotations

import random

import pytest

from piledriver.corpus.document import Document, Refusal
from tests.corpus.fuzz.law import hold
from tests.corpus.sources.test_hostile import NAMES
from tests.corpus.sources.test_pdf import pdf

PROSE = b"The river rises in the spring, falls in the summer, and the people of the town know it well.\n" * 40
CONTENTS = {
    "random bytes": random.Random(0).randbytes(20_000),
    "few random bytes": random.Random(1).randbytes(200),
    "pdf": pdf([(72, 700, 10, "A line of text in a file under another name.")] * 60),
    "prose and a nul": PROSE[:300] + b"\x00" + PROSE,
    "nul bytes": bytes(5000),
    "one nul byte": bytes(1),
    "picture": b"\x89PNG\r\n\x1a\n" + PROSE,
}
# Further names that a source takes for its raw data, each read by another reader.
OTHER_NAMES = {
    "pile-cc": ["a.html", "a.arc", "a.jsonl", "a.warc.gz"],
    "openwebtext2": ["a.warc"],
    "arxiv": ["1911.02782.gz", "1911.02782", "paper.tar.gz"],
    "freelaw": ["opinions.csv", "opinions.jsonl"],
    "uspto-backgrounds": ["pftaps19760113_wk02.txt"],
    "pubmed-abstracts": ["pubmed.txt"],
    "opensubtitles": ["a.srt"],
    "wikipedia-en": ["A.txt", "A.wikitext"],
    "youtubesubtitles": ["v.en.json3", "v.en.srv1"],
    "enron-emails": ["emails.csv", "a.mbox"],
    "mail": ["a.mbox", "a.csv"],
    "jsonl": ["a.json"],
}
CASES = [(slug, name) for slug, first in NAMES.items() for name in (first, *OTHER_NAMES.get(slug, ()))]


@pytest.mark.parametrize(("slug", "name"), CASES)
def test_binary_content_is_rejected_with_a_reason(slug: str, name: str) -> None:
    for kind, content in CONTENTS.items():
        if kind == "pdf" and slug == "pdf":
            continue
        found = hold(slug, {name: content})
        assert not [item.text[:80] for item in found if isinstance(item, Document)], kind
        assert [item.reason for item in found if isinstance(item, Refusal)], f"{kind} was not counted"
