from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths


def story(number: int = 1, **more: Any) -> dict[str, Any]:
    return {"id": number, "type": "story", "by": "ann", "title": "T &amp; U", "score": 2, "descendants": 1, **more}


def comment(number: int, parent: int, text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"id": number, "type": "comment", "by": f"user{number}", "parent": parent, "text": text, **more}


def lines(*items: Any) -> bytes:
    return b"".join(json.dumps(item).encode() + b"\n" for item in items)


def test_a_story_with_its_conversations() -> None:
    content = lines(
        comment(5, 3, "deep"),
        story(url="http://a.example/", kids=[4, 2]),
        comment(2, 1, "first<p>second"),
        comment(3, 2, "asked again"),
        comment(6, 2, "not followed"),
        comment(4, 1, "top"),
    )
    documents, refusals = extract_bytes("hackernews", "a.jsonl", content)
    assert not refusals
    assert documents[0].text == (
        "T & U - ann\n\nhttp://a.example/\n======\nuser4\ntop\n\n------\nuser2\nfirst\n\nsecond\n\n"
        "~~~\nuser3\nasked again\n\n~~~\nuser5\ndeep"
    )


def test_algolia_nests_replies() -> None:
    inner = {"id": 3, "author": "c", "type": "comment", "text": "reply", "parent_id": 2, "children": []}
    outer = {"id": 2, "author": "b", "type": "comment", "text": "comment", "parent_id": 1, "children": [inner]}
    item = {
        "id": 1,
        "author": "a",
        "type": "story",
        "title": "T",
        "points": 5,
        "created_at_i": 1160418111,
        "children": [outer],
    }
    documents, _ = extract_bytes("hackernews", "1.json", json.dumps(item, indent=1).encode())
    assert documents[0].text == "T - a\n======\nb\ncomment\n\n~~~\nc\nreply"
    assert documents[0].meta["date"] == "2006-10-09T18:21:51+00:00"


def test_what_is_not_taken_says_why() -> None:
    content = lines(
        story(1, dead=True),
        story(2, score=0),
        story(3, descendants=0),
        story(4),
        {"id": 5, "type": "job", "title": "Hiring"},
        comment(6, 99),
        comment(7, 4, deleted=True),
        None,
        {"title": "no id"},
        7,
    )
    documents, refusals = extract_bytes("hackernews", "a.jsonl", content)
    assert not documents
    assert sorted(refusal.reason for refusal in refusals) == [
        *("dead or deleted", "item without id", "no comments", "no comments", "not a story", "not an item"),
        *("reply without its story", "score below 1"),
    ]


def test_cut_links_are_whole_and_code_is_kept() -> None:
    link = '<a href="https:&#x2F;&#x2F;a.example&#x2F;long" rel="nofollow">https:&#x2F;&#x2F;a.exam...</a>'
    content = lines(story(), comment(2, 1, f"see {link}<p><pre><code>  x = 1\n</code></pre>"))
    documents, _ = extract_bytes("hackernews", "a.jsonl", content)
    assert documents[0].text.endswith("see https://a.example/long\n\n```\n  x = 1\n```")


def test_a_circle_of_replies_ends() -> None:
    documents, _ = extract_bytes(
        "hackernews", "a.jsonl", lines(story(), comment(2, 1), comment(3, 3), comment(4, 5), comment(5, 4))
    )
    assert documents[0].text.endswith("user2\nhi")


@pytest.mark.parametrize("wrap", [lambda items: items, lambda items: {"hits": items}], ids=["array", "hits"])
def test_one_value_with_many_items(wrap: Any) -> None:
    content = json.dumps(wrap([story(), comment(2, 1)])).encode()
    assert len(extract_bytes("hackernews", "a.json", content)[0]) == 1


@pytest.mark.skipif(not (SAMPLES / "hackernews").exists(), reason="no raw samples here")
def test_samples() -> None:
    documents, refusals = extract_paths("hackernews", SAMPLES / "hackernews")
    assert len(documents) == 1
    assert documents[0].text.endswith("Can that be what this thread is now about?")
    assert {refusal.reason for refusal in refusals} == {"no comments"}


VALID = lines(story(), comment(2, 1))


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=60), st.integers(0, len(VALID)))
def test_any_bytes_end_in_documents_or_refusals(noise: bytes, at: int) -> None:
    extract_bytes("hackernews", "a.json", noise)
    extract_bytes("hackernews", "a.jsonl", VALID[:at] + noise + VALID[at:])


names = st.sampled_from(["id", "kids", "type", "parent", "text", "children", "title", "time", "score"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=6),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(values, max_size=4))
def test_any_json_ends_in_documents_or_refusals(items: list[Any]) -> None:
    extract_bytes("hackernews", "a.jsonl", lines(story(), comment(2, 1), *items))


def test_a_nested_reply_belongs_to_what_it_is_nested_in() -> None:
    reply = {"id": 2, "type": "comment", "author": "bob", "text": "Yes."}
    nested = {"id": 1, "type": "story", "author": "ann", "title": "T", "points": 3, "children": [reply]}
    documents, refusals = extract_bytes("hackernews", "1.json", json.dumps(nested).encode())
    assert documents[0].text == "T - ann\n======\nbob\nYes."
    assert not refusals


def test_fields_of_another_type_cost_only_their_item() -> None:
    odd = [story(10, title=["x"], by=7), comment(11, 10), story(20, url={"a": 1}, type=["story"]), comment(21, 20)]
    documents, refusals = extract_bytes("hackernews", "a.jsonl", lines(*odd, story(), comment(2, 1)))
    assert {document.meta["item_id"] for document in documents} >= {1}
    assert {refusal.reason for refusal in refusals} == {"no title"}
