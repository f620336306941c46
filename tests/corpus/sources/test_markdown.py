from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.sources.extracting import extract_bytes


def test_front_matter_becomes_meta_and_comments_go() -> None:
    text = "---\ntitle: On Tea\nlicense: CC BY 4.0\n---\n# Tea\n\n<!-- note -->\n```html\n<!-- kept -->\n```\n<!-- open"
    documents, _ = extract_bytes("markdown", "a.md", text.encode())
    assert documents[0].text == "# Tea\n\n```html\n<!-- kept -->\n```\n<!-- open"
    assert documents[0].meta["title"] == "On Tea"
    assert documents[0].meta["licence"] == "CC-BY-4.0"


def test_a_rule_at_the_start_is_no_front_matter() -> None:
    documents, _ = extract_bytes("markdown", "a.md", b"---\nJust a rule, not: [yaml\n---\nText")
    assert documents[0].text.startswith("---\nJust a rule")


@settings(max_examples=40, deadline=None)
@given(st.text(alphabet="-\n`~<!>a: &*", max_size=60))
def test_any_text_ends_in_a_document_or_a_refusal(noise: str) -> None:
    documents, refusals = extract_bytes("markdown", "a.md", f"---\n{noise}".encode())
    assert len(documents) + len(refusals) == 1


def test_front_matter_of_hugo() -> None:
    content = b'+++\ntitle = "T"\ndate = 2020-01-02T03:04:05Z\ntags = ["a"]\n+++\nText.\n'
    documents, _ = extract_bytes("markdown", "a.md", content)
    assert documents[0].text == "Text."
    assert (documents[0].meta["title"], documents[0].meta["date"]) == ("T", "2020-01-02T03:04:05+00:00")
    documents, _ = extract_bytes("markdown", "a.md", b"+++\nno toml\n+++\nText.\n")
    assert documents[0].text.startswith("+++")
