"""Every file of examples/ does what it says, small."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from piledriver.cli.main import main
from piledriver.corpus import read_shards

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
POEMS = """old pond
a frog leaps in
water's sound

not a haiku

the light of a candle
is moved to another
spring twilight
"""


def run_script(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def command(*words: str, cwd: Path, **environ: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "piledriver.cli.main", *words],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def installed(example: str, folder: Path) -> str:
    """Install a plug-in package without the network; the PYTHONPATH that finds it."""
    shutil.copytree(EXAMPLES / example, folder / "package")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    offline = ["--no-build-isolation", "--no-index", "--no-compile", "--target", str(folder / "site")]
    subprocess.run([*pip, *offline, str(folder / "package")], check=True)
    return os.pathsep.join([str(folder / "site"), os.environ.get("PYTHONPATH", "")])


def last_number(text: str) -> float:
    return float(text.split()[-1])


def test_every_example_is_listed_and_every_listed_one_exists() -> None:
    listed = {
        line.split("`")[1].rstrip("/") for line in (EXAMPLES / "README.md").read_text().splitlines() if "| `" in line
    }
    assert listed == {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}


def test_a_raw_loop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_script(monkeypatch, "raw_loop.py", "--epochs", "3", "--checkpoint", str(tmp_path / "checkpoint"))
    first, *_, last = capsys.readouterr().out.splitlines()
    assert last_number(last) < last_number(first) / 2
    assert list((tmp_path / "checkpoint").iterdir())


def test_a_functional_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run_script(monkeypatch, "functional_model.py", "--steps", "60")
    first, *_, last = capsys.readouterr().out.splitlines()
    assert last_number(last) < last_number(first) / 2


def test_the_functional_code_of_the_readme() -> None:
    section = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8").split("## Functional")[1]
    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(section.split("```python")[1].split("```")[0], "README.md", "exec", dont_inherit=True), names)
    assert names["state"].step == 1


@pytest.mark.slow
def test_a_recipe_and_a_run_on_its_corpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["corpus", "build", str(EXAMPLES / "recipe.yaml"), "-o", "corpus"]) == 0
    assert {document.source for document in read_shards("corpus/train")} == {"Markdown", "Code"}
    assert any(read_shards("corpus/validation"))
    small = ["model={vocab_size: 512, dim: 32, layers: 1, heads: 2, max_positions: 64}", "data.seq_len=64"]
    short = ["batch_tokens=256", "budget_tokens=2560", "checkpoint_steps=5", "trackers=[]", "plots=false"]
    assert main(["train", str(EXAMPLES / "train.yaml"), *small, *short]) == 0
    metrics = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == 10
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_layout_on_two_processes(tmp_path: Path) -> None:
    printed = command("launch", "--nproc", "2", str(EXAMPLES / "layout_loop.py"), "--steps", "10", cwd=tmp_path)
    losses = [last_number(line) for line in printed.splitlines() if line.startswith("step")]
    assert len(losses) == 2
    assert losses[-1] < losses[0] < 6


@pytest.mark.slow
def test_a_source_of_another_package(tmp_path: Path) -> None:
    path = installed("own_source", tmp_path)
    (tmp_path / "poems.txt").write_text(POEMS)
    extract = ["corpus", "extract", "haiku", "poems.txt", "-o", "poems.jsonl.zst", "--json"]
    command(*extract, cwd=tmp_path, PYTHONPATH=path)
    documents = list(read_shards(tmp_path / "poems.jsonl.zst"))
    assert [document.text.splitlines()[0] for document in documents] == ["old pond", "the light of a candle"]
    assert {document.source for document in documents} == {"Haiku"}


@pytest.mark.slow
def test_an_optimizer_of_another_package(tmp_path: Path) -> None:
    path = installed("own_optimizer", tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    command("corpus", "extract", "text", "text.txt", "-o", "text.jsonl.zst", cwd=tmp_path)
    small = ["model={vocab_size: 260, dim: 32, layers: 1, heads: 2, max_positions: 64}", "data.corpus=text.jsonl.zst"]
    short = ["batch_tokens=128", "budget_tokens=1280", "trackers=[]", "plots=false"]
    chosen = ["optimizer.kind=sign_sgd", "optimizer.lr=1e-3", "optimizer.settings={scale: 2.0}"]
    command("train", *small, *short, *chosen, cwd=tmp_path, PYTHONPATH=path)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    assert "sign_sgd" in (tmp_path / "run/config.yaml").read_text()
