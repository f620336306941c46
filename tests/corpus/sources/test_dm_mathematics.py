"""DM Mathematics: the published question files are read pair by pair and cut after an answer."""

from __future__ import annotations

import pytest

from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths


def test_documents_are_cut_after_an_answer() -> None:
    content = "".join(f"What is {number} + 1?\n{number + 1}\n" for number in range(1500))
    documents, refusals = extract_bytes("dm-mathematics", "algebra__sums.txt", content.encode())
    assert refusals == []
    assert len(documents) > 2
    assert "\n".join(document.text for document in documents) == content.strip()
    assert all(8192 < len(document.text) < 11_000 for document in documents[:-1])
    assert all(document.text.startswith("What is ") for document in documents)
    first = int(documents[1].text.split()[2])
    assert documents[1].meta["origin"] == f"algebra__sums.txt#{first}"


def test_doubled_newlines_and_a_question_without_an_answer() -> None:
    documents, refusals = extract_bytes(
        "dm-mathematics", "q.txt", b"What is 1 + 1?\n\n2\n\nWhat is 2*3?\n\n6\n\nlost?\n"
    )
    assert [document.text for document in documents] == ["What is 1 + 1?\n2\nWhat is 2*3?\n6"]
    assert [refusal.reason for refusal in refusals] == ["question without answer"]


@pytest.mark.skipif(not (SAMPLES / "dm-mathematics").exists(), reason="the shared raw samples are not here")
def test_the_published_files_are_read() -> None:
    documents, refusals = extract_paths("dm-mathematics", SAMPLES / "dm-mathematics")
    assert refusals == []
    for document in documents:
        assert document.meta["level"] in {"train-easy", "train-medium", "train-hard", "interpolate", "extrapolate"}
        assert f"{document.meta['module']}.txt" in document.meta["origin"]
        lines = document.text.split("\n")
        assert len(lines) % 2 == 0
