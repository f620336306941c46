from __future__ import annotations

import bz2
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.corpus.sources.openwebtext2.reddit import url_key
from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths

PROSE = "This is a sentence of the article, and it has a clause. Here is another one, which makes it prose. " * 4


def page(folder: Path, name: str, url: str | None, text: str = PROSE) -> None:
    link = f'<link rel="canonical" href="{url}">' if url else ""
    (folder / name).write_text(f"<html><head>{link}</head><body><p>{text}</p><p>Advertisement</p></body></html>")


def submission(url: str, score: Any, **more: Any) -> bytes:
    return (
        json.dumps({"url": url, "score": score, "id": "x1", "subreddit": "python", "title": "T", **more}).encode()
        + b"\n"
    )


def reasons(folder: Path) -> tuple[list[str], list[str]]:
    documents, refusals = extract_paths("openwebtext2", folder)
    return [document.meta["url"] for document in documents], [refusal.reason for refusal in refusals]


def test_scores_of_all_submissions_are_summed(tmp_path: Path) -> None:
    page(tmp_path, "a.html", "https://a.example/x")
    page(tmp_path, "b.html", "https://b.example/x")
    page(tmp_path, "c.html", "https://c.example/x")
    dump = submission("http://www.a.example/x/#top", 2) + submission("https://a.example/x", "1")
    (tmp_path / "RS_2020-01").write_bytes(dump + submission("https://b.example/x", 2))
    documents, refusals = extract_paths("openwebtext2", tmp_path)
    assert [document.meta["url"] for document in documents] == ["https://a.example/x"]
    assert documents[0].text == PROSE.strip()
    assert documents[0].meta["score"] == 3
    assert [seen["subreddit"] for seen in documents[0].meta["reddit"]] == ["python", "python"]
    assert [refusal.reason for refusal in refusals] == ["score below 3", "not submitted"]


def zstd_with_long_window(content: bytes) -> bytes:
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(content)


@pytest.mark.parametrize(
    ("suffix", "pack"), [(".zst", zstd_with_long_window), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_dumps_come_compressed(tmp_path: Path, suffix: str, pack: Any) -> None:
    page(tmp_path, "a.html", "https://a.example/x")
    (tmp_path / f"RS_2012-01{suffix}").write_bytes(pack(submission("https://a.example/x", 5)))
    assert reasons(tmp_path) == (["https://a.example/x"], [])


def test_addresses_that_are_never_taken(tmp_path: Path) -> None:
    for index, url in enumerate(
        ["https://i.imgur.com/x", "https://a.example/x.PDF?y=1", "https://a.example/x", "http://a.example/x/"]
    ):
        page(tmp_path, f"{index}.html", url)
    page(tmp_path, "9.html", "https://notimgur.com/x")
    urls, refused = reasons(tmp_path)
    assert urls == ["https://a.example/x", "https://notimgur.com/x"]
    assert refused == ["excluded domain", "excluded extension", "duplicate url"]


def test_self_posts_and_nonsense_do_not_count(tmp_path: Path) -> None:
    page(tmp_path, "a.html", "https://a.example/x")
    (tmp_path / "RS_1.jsonl").write_bytes(
        submission("https://a.example/x", 9, is_self=True) + b"nonsense\n" + submission("b", 5)
    )
    page(tmp_path, "b.html", "https://b.example/")
    (tmp_path / "RS_2.jsonl").write_bytes(submission("https://b.example", 5))
    assert reasons(tmp_path) == (["https://b.example/"], ["invalid submission", "not submitted"])


def test_without_dumps_every_page_is_taken(tmp_path: Path) -> None:
    page(tmp_path, "a.html", None)
    assert len(extract_paths("openwebtext2", tmp_path)[0]) == 1


@pytest.mark.skipif(not (SAMPLES / "openwebtext2").exists(), reason="no raw samples here")
def test_samples() -> None:
    documents, _ = extract_paths("openwebtext2", SAMPLES / "openwebtext2")
    blog = next(document for document in documents if "v8-blog/source" in document.meta["origin"])
    assert "```c\n// add.c\n#include <emscripten.h>" in blog.text
    assert "## Using standalone mode in Emscripten\n" in blog.text


@settings(max_examples=60)
@given(st.text(max_size=40))
def test_a_key_is_its_own_key(url: str) -> None:
    key = url_key(f"http://a.example/{url}")
    if key is not None:
        assert url_key(f"https://{key}") == key


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=100), st.sampled_from(["RS_1.zst", "RS_1", "a.html", "a.warc.gz"]))
def test_any_bytes_end_in_documents_or_refusals(noise: bytes, name: str) -> None:
    extract_bytes("openwebtext2", name, noise)
    extract_bytes("openwebtext2", name, submission("https://a.example", 5) + noise)
