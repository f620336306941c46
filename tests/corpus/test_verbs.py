"""The verbs that look into shards, as a newcomer types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from piledriver.cli.main import main
from piledriver.corpus.document import make_document
from piledriver.corpus.shards.writer import ShardFileWriter


@pytest.fixture
def shard(tmp_path: Path) -> str:
    path = tmp_path / "two.jsonl.zst"
    with ShardFileWriter(path) as writer:
        for source in ("Wikipedia (en)", "Notes of mine"):
            writer.write(make_document(f"a text of {source}", source=source, origin="x", licence="CC0-1.0"))
    return str(path)


def test_counts_as_json(shard: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["corpus", "stats", shard, "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)
    assert counted["Notes of mine"] == {"documents": 1, "text_bytes": 23, "licences": {"CC0-1.0": 1}}


def test_nothing_to_count_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert main(["corpus", "stats", str(tmp_path)]) == 1
    assert "holds no documents" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["wikipedia-en", "Wikipedia (en)", "Notes of mine"])
def test_a_source_is_found_by_slug_and_by_the_name_in_the_shards(
    name: str, shard: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["corpus", "show", shard, "--source", name, "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.parametrize("wrong", [["--source", "nobody"], ["--limit", "-1"], ["--start", "-1"]])
def test_what_cannot_be_shown_is_wrong_usage(wrong: list[str], shard: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["corpus", "show", shard, *wrong]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("verb", [["build", "local"], ["dedup"]])
def test_a_file_in_the_place_of_the_corpus_is_named(
    verb: list[str], shard: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = verb if verb == ["build", "local"] else [*verb, shard]
    assert main(["corpus", *given, "-o", shard]) == 1
    assert f"cannot write {shard}" in capsys.readouterr().err


def test_a_file_without_permission_is_not_called_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "closed.txt").write_text("a text")
    (tmp_path / "closed.txt").chmod(0)
    if os.access(tmp_path / "closed.txt", os.R_OK):
        pytest.skip("this user may read everything")
    assert main(["corpus", "extract", "text", str(tmp_path), "-o", str(tmp_path / "out.jsonl.zst")]) == 1
    assert "1 no permission to read" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reader_that_leaves_the_table_is_no_error() -> None:
    command = f"{sys.executable} -m piledriver.cli.main corpus sources | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
