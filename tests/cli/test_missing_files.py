"""A file that does not exist is the same for every verb: exit code 1, one line that names it, nothing written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from piledriver.cli.main import main


@pytest.mark.parametrize(
    "command",
    [
        "corpus extract text nowhere -o out.jsonl.zst",
        "corpus build nowhere.yaml -o out",
        "corpus dedup nowhere -o out",
        "corpus classifier --good nowhere --bad nowhere -o out",
        "corpus verify nowhere",
        "corpus card nowhere",
        "corpus show nowhere",
        "corpus show nowhere --dropped",
        "corpus stats nowhere.jsonl.zst",
        "tokenizer train nowhere -o out --vocab-size 300",
        "tokenize nowhere --tokenizer few.jsonl -o out",
        "tokenize few.jsonl --tokenizer nowhere.json -o out",
        "trace nowhere --step 1",
        "launch nowhere.py",
        "launch --config nowhere.yaml --print-config",
        "test --config nowhere.yaml",
        "config --show --file nowhere.yaml",
        "train nowhere.yaml",
        "train model=tiny data.tokens=nowhere batch_tokens=512 budget_tokens=1024",
        "train model=tiny data.corpus=nowhere batch_tokens=512 budget_tokens=1024",
        "train model=tiny data.corpus=few.jsonl batch_tokens=512 budget_tokens=1024 --validation nowhere",
        "checkpoint inspect nowhere",
        "checkpoint merge nowhere -o out",
        "checkpoint convert nowhere -o out",
        "evaluate bpb --model nowhere --corpus few.jsonl",
        "evaluate bpb --model . --corpus nowhere",
        "evaluate lm-eval --model . --tasks t --include nowhere",
    ],
)
def test_one_line_and_exit_code_1(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("few.jsonl").write_text('{"text": "one two three", "meta": {"pile_set_name": "Few"}}\n')
    assert main(command.split()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "nowhere" in line or "few.jsonl" in line
    assert "--debug" not in line, "an error without a class of its own"
    assert [path.name for path in tmp_path.iterdir()] == ["few.jsonl"]


@pytest.mark.parametrize(
    ("code", "command"),
    [
        (2, "train modl=tiny"),
        (2, "train model=tiy data.tokens=t batch_tokens=512 budget_tokens=1024"),
        (2, "train model=tiny data.tokens=t batch_tokens=512 budget_tokens=1024 optimizer.kind=adm"),
        (2, "train model=tiny data.tokens=t batch_tokens=512 budget_tokens=1024 layout.zero=7"),
        (1, "train nowhere.yaml"),
        (0, "train --keys"),
        (0, "presets"),
        (1, "checkpoint inspect nowhere"),
        (2, "checkpoint merge . -o out --dtype flat16"),
        (2, "checkpoint merge . -o out --max-shard-size five"),
        (2, "checkpoint convert . -o out --to onnx"),
        (1, "evaluate bpb --model nowhere --corpus nowhere"),
    ],
)
def test_what_is_wrong_with_a_config_is_known_before_torch_is_imported(code: int, command: str, tmp_path: Path) -> None:
    program = (
        "import sys; from piledriver.cli.main import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
