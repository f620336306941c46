from __future__ import annotations

import io
import random
from pathlib import Path
from xml.sax.saxutils import quoteattr

import py7zr
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.corpus.sources.stackexchange import rows as stack_exchange_rows
from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths


def row(**fields: object) -> str:
    return "  <row " + " ".join(f"{name}={quoteattr(str(value))}" for name, value in fields.items()) + " />"


def question(number: int, **more: object) -> str:
    fields = {
        "Id": number,
        "PostTypeId": 1,
        "CreationDate": "2012-01-01",
        "Score": 1,
        "Body": "<p>Why?</p>",
        "Title": "A &amp; B",
    }
    return row(**fields | more)


def answer(number: int, parent: int, score: int = 3, body: str = "Because.", **more: object) -> str:
    fields = {"Id": number, "PostTypeId": 2, "ParentId": parent, "CreationDate": "2012-01-02", "Score": score}
    return row(**fields | {"Body": f"<p>{body}</p>"} | more)


def posts(*rows: str) -> bytes:
    return ('\ufeff<?xml version="1.0" encoding="utf-8"?>\n<posts>\n' + "\n".join(rows) + "\n</posts>").encode()


def test_a_question_with_its_three_best_answers() -> None:
    content = posts(
        question(1, AcceptedAnswerId=6, Tags="<a><b>"),
        *(answer(n, 1, score, f"Score {score}.") for n, score in ((2, 3), (3, 9), (4, 5), (5, 2), (6, -1))),
    )
    documents, refusals = extract_bytes("stackexchange", "Posts.xml", content)
    assert not refusals
    assert documents[0].text == "Q:\n\nA & B\n\nWhy?\n\nA:\n\nScore 9.\n\nA:\n\nScore 5.\n\nA:\n\nScore 3."
    assert documents[0].meta["answer_ids"] == [3, 4, 2]
    assert documents[0].meta["tags"] == ["a", "b"]


def test_an_accepted_answer_needs_no_score() -> None:
    documents, _ = extract_bytes("stackexchange", "Posts.xml", posts(question(1, AcceptedAnswerId=2), answer(2, 1, -4)))
    assert documents[0].meta["answer_ids"] == [2]


def test_what_is_not_taken_says_why() -> None:
    content = posts(question(1), question(2), answer(3, 2, 2), answer(4, 99), row(Id=5, PostTypeId=5, Body="wiki"))
    _, refusals = extract_bytes("stackexchange", "Posts.xml", content)
    assert {refusal.origin: refusal.reason for refusal in refusals} == {
        "Posts.xml#5": "neither question nor answer",
        "Posts.xml#1": "no answers",
        "Posts.xml#2": "no accepted or well scored answer",
        "Posts.xml#4": "answer without question",
    }


def test_posts_may_come_in_any_order_and_through_files(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [question(n * 70_000) for n in range(1, 9)] + [
        answer(n, (n % 8 + 1) * 70_000, body=f"{n}") for n in range(1, 40)
    ]
    expected, _ = extract_bytes("stackexchange", "Posts.xml", posts(*rows))
    random.Random(3).shuffle(rows)
    monkeypatch.setattr(stack_exchange_rows, "_MEMORY_BYTES", 500)
    found, refusals = extract_bytes("stackexchange", "Posts.xml", posts(*rows))
    assert not refusals
    assert found == expected


def test_the_licence_is_the_latest_of_the_parts() -> None:
    content = posts(question(1, CreationDate="2010-01-01"), answer(2, 1, ContentLicense="CC BY-SA 4.0"))
    documents, _ = extract_bytes("stackexchange", "Posts.xml", content)
    assert documents[0].meta["licence"] == "CC-BY-SA-4.0"
    content = posts(question(1, CreationDate="2010-01-01"), answer(2, 1, CreationDate="2011-01-01"))
    assert extract_bytes("stackexchange", "Posts.xml", content)[0][0].meta["licence"] == "CC-BY-SA-2.5"


def test_forbidden_characters_do_not_cost_a_post() -> None:
    content = posts(question(1), answer(2, 1)).replace(b"Why?", b"Why &#x1;&lt;b&gt;now&lt;/b&gt;?")
    documents, _ = extract_bytes("stackexchange", "Posts.xml", content)
    assert "Why now?" in documents[0].text.replace("\ufffd", "")


def test_the_dump_of_a_site_is_read_as_downloaded(tmp_path: Path) -> None:
    path = tmp_path / "tea.stackexchange.com.7z"
    with py7zr.SevenZipFile(path, "w") as archive:
        archive.writestr("<users/>", "Users.xml")
        archive.writestr(posts(question(1), answer(2, 1)), "Posts.xml")
    documents, refusals = extract_paths("stackexchange", path)
    assert not refusals
    assert documents[0].meta["site"] == "tea.stackexchange.com"
    assert documents[0].meta["url"] == "https://tea.stackexchange.com/q/1"
    assert documents[0].meta["origin"] == "tea.stackexchange.com.7z!Posts.xml#1"


def test_rows_are_found_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    content = posts(question(1), answer(2, 1), question(3, Body="x" * 5000), answer(4, 3))
    expected = list(stack_exchange_rows.read_rows(io.BytesIO(content), "o"))
    assert len(expected) == 4
    for size in (1, 7, 64):
        monkeypatch.setattr(stack_exchange_rows, "_BLOCK_BYTES", size)
        assert list(stack_exchange_rows.read_rows(io.BytesIO(content), "o")) == expected
    monkeypatch.setattr(stack_exchange_rows, "MAX_ROW_BYTES", 1000)
    found = list(stack_exchange_rows.read_rows(io.BytesIO(content), "o"))
    assert [getattr(item, "reason", "row") for item in found] == ["row", "row", "row too long", "row"]


@pytest.mark.skipif(not (SAMPLES / "stackexchange").exists(), reason="no raw samples here")
def test_samples() -> None:
    documents, refusals = extract_paths("stackexchange", SAMPLES / "stackexchange")
    assert len(documents) == 212
    assert len(refusals) == 82
    assert all("<p>" not in document.text for document in documents)


VALID = posts(question(1), answer(2, 1))


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=50), st.integers(0, len(VALID)))
def test_any_bytes_end_in_documents_or_refusals(noise: bytes, at: int) -> None:
    extract_bytes("stackexchange", "Posts.xml", noise)
    extract_bytes("stackexchange", "Posts.xml", VALID[:at] + noise + VALID[at:])
    extract_bytes("stackexchange", "Posts.xml", VALID[:at])


def test_tags_of_old_and_new_dumps_and_the_site_in_the_name_of_the_file() -> None:
    for tags in ("|python|c++|", "&lt;python&gt;&lt;c++&gt;"):
        rows = (
            f'<row Id="1" PostTypeId="1" Score="5" Title="t" Tags="{tags}" Body="q" />'
            '<row Id="2" PostTypeId="2" ParentId="1" Score="9" Body="a" />'
        )
        documents, _ = extract_bytes(
            "stackexchange", "math.stackexchange.com-Posts.xml", f"<posts>{rows}</posts>".encode()
        )
        assert documents[0].meta["tags"] == ["python", "c++"]
        assert documents[0].meta["site"] == "math.stackexchange.com"


@pytest.mark.parametrize(
    ("folder", "host"),
    [("data.old", None), ("french.meta", None), ("french.stackexchange.com", "french.stackexchange.com")],
)
def test_an_address_is_made_of_the_name_of_a_site_only(folder: str, host: str | None, tmp_path: Path) -> None:
    (tmp_path / folder).mkdir()
    (tmp_path / folder / "Posts.xml").write_bytes(VALID)
    documents, _ = extract_paths("stackexchange", tmp_path / folder)
    assert documents[0].meta.get("url") == (f"https://{host}/q/{documents[0].meta['question_id']}" if host else None)
