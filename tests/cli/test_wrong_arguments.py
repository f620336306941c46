"""What cannot be meant, verb by verb: one line with the value and the fix, the right exit code, nothing written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from piledriver.cli.main import main

SHARD = '{"text": "one two three four five six seven", "meta": {"pile_set_name": "Few"}}\n'
HUGE = "9" * 30
TRAIN = ["train", "model=tiny", "data.tokens=t", "batch_tokens=512", "budget_tokens=1024"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a shard, a folder, a file that is neither, and tokenizers that are none."""
    monkeypatch.chdir(tmp_path)
    Path("few.jsonl").write_text(SHARD)
    Path("empty.jsonl").touch()
    Path("file").write_text("1/0\n")
    Path("folder").mkdir()
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    for name in ("empty.model", "gpt2.tiktoken"):
        Path(name).touch()
    Path("cl100k_base.tiktoken").write_text("YQ== 0\n")
    Path("two").mkdir()
    Path("two/vocab.json").write_bytes(b"\xff")
    Path("two/merges.txt").touch()
    return tmp_path


@pytest.mark.parametrize(
    ("code", "arguments", "said"),
    [
        (2, ["corpus", "stats", ""], "an argument is empty"),
        (2, ["corpus", "show", "few.jsonl", "--limit", HUGE], "is too large"),
        (2, ["corpus", "show", "few.jsonl", "--limit", "²"], "'²' is not a positive whole number"),
        (2, ["corpus", "card", "folder", "--read", HUGE], "is too large"),
        (2, ["corpus", "extract", "text", "file", "-o", "a.jsonl.zst", "--workers", "99999999"], "too many, the limit"),
        (2, ["corpus", "extract", "jsonl", "few.jsonl", "-o", "./few.jsonl"], "is both input and output"),
        (
            2,
            ["corpus", "extract", "text", "file", "-o", "a.jsonl.zst", "--rejects", "./a.jsonl.zst"],
            "both be written to a.jsonl",
        ),
        (
            2,
            ["tokenizer", "train", "few.jsonl", "-o", "t", "--vocab-size", "9" * 18],
            "it must be from 257 to 16777216",
        ),
        (
            2,
            ["tokenizer", "train", "few.jsonl", "-o", "t", "--vocab-size", "300", "--weight", "Few=nan"],
            "'Few' is nan",
        ),
        (
            2,
            ["tokenizer", "train", "few.jsonl", "-o", "t", "--vocab-size", "300", *["--special", "a"] * 2],
            "each once",
        ),
        (1, ["tokenize", "few.jsonl", "-o", "o", "--tokenizer", "empty.model"], "it is empty"),
        (1, ["tokenize", "few.jsonl", "-o", "o", "--tokenizer", "gpt2.tiktoken"], "byte 0 has no rank"),
        (1, ["tokenize", "few.jsonl", "-o", "o", "--tokenizer", "cl100k_base.tiktoken"], "byte 0 has no rank"),
        (1, ["tokenize", "few.jsonl", "-o", "o", "--tokenizer", "two"], "vocab.json or merges.txt is damaged"),
        (2, ["train"], "'model' is required. Fix: add model=..."),
        (2, [*TRAIN, "out=''"], "out is empty"),
        (2, [*TRAIN, f"seed={HUGE}"], f"seed is {HUGE}"),
        (2, [*TRAIN, "clip=.nan"], "'clip' is nan. Fix: it must be a number"),
        (2, [*TRAIN, "clip=nan"], "'clip' is nan. Fix: it must be a number"),
        (2, [*TRAIN, "optimizer.lr=.inf"], "optimizer.lr is inf"),
        (2, [*TRAIN, "z_loss=-1"], "z_loss is -1.0"),
        (2, ["train", *TRAIN[1:4], "budget_minutes=.inf"], "the schedule needs an end"),
        (1, ["evaluate", "bpb", "--model", "folder", "--corpus", "few.jsonl"], "folder has no config.json"),
        (2, ["evaluate", "bpb", "--model", "folder", "--corpus", "empty.jsonl"], "empty.jsonl holds no documents"),
        (
            2,
            ["evaluate", "bpb", "--model", "folder", "--corpus", "few.jsonl", "--chart", "folder"],
            "folder is a folder",
        ),
        (2, ["evaluate", "lm-eval", "--model", "m", "--tasks", "t", "--few-shot", "-1"], "--few-shot"),
        (2, ["trace", "folder", "--step", HUGE], "is too large"),
        (2, ["profile", "folder"], "folder is not a run folder: it holds no config.yaml"),
        (
            2,
            ["profile", "model"],
            "model is a model folder: it holds no config.yaml. Fix: give a config with model: model",
        ),
        (1, ["trace", "x" * 5000, "--step", "1"], "give a shorter path"),
        (2, ["launch", "--nproc", "0", "file"], "--nproc is 0"),
        (2, ["launch", "--nproc", "999999999", "file"], "too many, the limit"),
        (2, ["launch", "--nnodes", "2", "--rdzv-endpoint", "host", "file"], "'host' is not HOST:PORT"),
        (2, ["launch", "--nnodes", "2", "--rdzv-endpoint", "host:99999", "file"], "'host:99999' is not HOST:PORT"),
        (2, ["launch", "--rdzv-timeout-seconds", "nan", "file"], "'nan' is not a number of seconds"),
        (2, ["launch", "--log-dir", "file", "file"], "'file' is a file, not a folder"),
        (1, ["config", "--show"], "'piledriver config' writes it"),
        (2, ["demo", "--minutes", "nan"], "nan minutes of training"),
        (1, ["demo", "--out", "file/demo"], "cannot write file/demo"),
    ],
)
def test_one_line_and_nothing_written(
    code: int,
    arguments: list[str],
    said: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(here / "nothing"))
    before = sorted(here.rglob("*"))
    assert main(arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert "--debug" not in line, "an error that nobody thought of"
    assert sorted(here.rglob("*")) == before


def test_what_panics_in_another_language_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class PanicException(BaseException):
        pass

    def panic(_: object) -> None:
        raise PanicException("capacity overflow")

    monkeypatch.setattr("piledriver.cli.env.run", panic)
    assert main(["env"]) == 1
    assert capsys.readouterr().err == (
        "piledriver: error: PanicException: capacity overflow (run again with --debug for the traceback)\n"
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_not_an_empty_one(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "folder").chmod(0)
    try:
        assert main(["corpus", "verify", "folder"]) == 1
    finally:
        (here / "folder").chmod(0o755)
    assert "cannot read folder/manifest.json: Permission denied" in capsys.readouterr().err
