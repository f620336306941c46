"""Ubuntu IRC: what is a line, what is a week."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from piledriver.corpus.sources.ubuntu_irc import day_lines
from tests.corpus.sources.extracting import SAMPLES, extract_bytes, extract_paths

DAY = b"""=== bo [~bo@x]  has joined #ubuntu
[08:36] <bo> hi   all
[08:37]  * bo waves
=== mode (+o bo) by ChanServ
=== bo is now known as bob
[08:38] <bob> \x034red\x0f caf\xe9
not stamped
"""


def test_lines() -> None:
    assert day_lines(DAY) == [
        "<bo> hi   all",
        "* bo waves",
        "* mode (+o bo) by ChanServ",
        "<bob> red café",
        "not stamped",
    ]


def test_a_day_of_the_server_alone_is_refused() -> None:
    _, refusals = extract_bytes("ubuntu-irc", "2007-01-11-#ubuntu.txt", b"=== a has joined #ubuntu\n=== x\n")
    assert [refusal.reason for refusal in refusals] == ["no messages"]


def test_a_week_of_a_channel_is_a_document_and_years_do_not_mix(tmp_path: Path) -> None:
    for place in ("2007/03/19", "2007/03/20", "2007/03/26", "2008/03/17"):
        for channel in ("#ubuntu", "%23kubuntu"):
            folder = tmp_path / place
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{channel}.txt").write_text(f"[10:00] <a> {place}\n")
    documents, refusals = extract_paths("ubuntu-irc", tmp_path)
    assert refusals == []
    assert {(d.meta["channel"], d.meta["week"]) for d in documents} == {
        (channel, week) for channel in ("#ubuntu", "#kubuntu") for week in ("2007-W12", "2007-W13", "2008-W12")
    }
    week = next(d for d in documents if d.meta["week"] == "2007-W12" and d.meta["channel"] == "#ubuntu")
    assert week.text == "#ubuntu 2007-03-19\n<a> 2007/03/19\n\n#ubuntu 2007-03-20\n<a> 2007/03/20"


def test_a_file_without_date_is_refused() -> None:
    _, refusals = extract_bytes("ubuntu-irc", "notes.txt", b"[10:00] <a> b\n")
    assert [refusal.reason for refusal in refusals] == ["no date in the name"]


@given(st.binary(max_size=300))
@settings(max_examples=60)
def test_any_bytes(content: bytes) -> None:
    assert day_lines(content) is None or day_lines(content)


@pytest.mark.skipif(not (SAMPLES / "ubuntu-irc").exists(), reason="the shared raw samples are not here")
def test_samples() -> None:
    documents, refusals = extract_paths("ubuntu-irc", SAMPLES / "ubuntu-irc")
    assert refusals == []
    assert len(documents) == 12
    assert not any("has joined #" in d.text.split("<")[0] or "\n[" in d.text[:5000] for d in documents)
