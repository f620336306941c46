"""What is wrong with a corpus or a tokenizer, said with something that the command line has."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from piledriver.cli.main import main
from piledriver.corpus import read_shards

GOOD = '{"text": "one two three", "meta": {"pile_set_name": "Mine", "id": "7", "licence": "MIT"}}\n'


@pytest.mark.parametrize(
    "verb",
    [
        ["corpus", "show", "IN"],
        ["corpus", "stats", "IN"],
        ["tokenizer", "train", "IN", "-o", "t.json", "--vocab-size", "300"],
        ["train", "data.corpus=IN", "model=tiny", "batch_tokens=512", "budget_tokens=1024"],
    ],
)
def test_a_broken_line_is_left_out_by_the_command_that_is_advised(
    verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shard = Path("a b.jsonl")
    shard.write_bytes(GOOD.encode() + b"{broken\n" + b'{"text": "\xff"}\n' + GOOD.replace("one", "two").encode())
    assert main([word.replace("IN", str(shard)) for word in verb]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert "a b.jsonl: document 1" in said
    assert "on_bad" not in said
    advised = shlex.split(said.partition("what is intact: ")[2])
    assert main(advised[1:]) == 0
    kept = list(read_shards(advised[-1]))
    assert [document.text for document in kept] == ["one two three", "two two three"]
    assert [(document.id, document.source, document.meta) for document in kept] == [
        ("7", "Mine", {"licence": "MIT"})
    ] * 2


def test_a_recipe_without_its_raw_files_says_what_to_put_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["corpus", "build", "open", "-o", "out"]) == 1
    *missing, error = capsys.readouterr().err.splitlines()
    assert len(missing) == 14
    assert any(line.startswith("missing: raw/arxiv: ") and "https://info.arxiv.org" in line for line in missing)
    assert "raw/pubmed-central does not exist" in error
    assert not (tmp_path / "out").exists()


RECIPE = "sources: [{source: text, paths: [a.txt]}]\ntotal_tokens: 10\nname: few\ntokenizer: "


@pytest.mark.parametrize(
    ("files", "given", "said"),
    [
        (["vocab.txt"], "tok", "tok holds vocab.txt, no tokenizer.json"),
        (["spiece.model"], "tok", "tok holds spiece.model, no tokenizer.json"),
        (["spiece.model"], "tok/spiece.model", "spiece.model is not a tokenizer.json"),
        (["config.json"], "tok", "tok holds no tokenizer.json"),
    ],
)
def test_a_tokenizer_that_cannot_count_a_budget_is_refused_with_the_way_to_one_that_can(
    files: list[str], given: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tok").mkdir()
    for name in files:
        (tmp_path / "tok" / name).write_bytes(b"\xff\xfe")
    (tmp_path / "a.txt").write_text("one two three")
    (tmp_path / "recipe.yaml").write_text(RECIPE + given)
    assert main(["corpus", "build", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert "save_pretrained(" in line or files == ["config.json"]
    assert not (tmp_path / "out").exists()
