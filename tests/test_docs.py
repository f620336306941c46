"""What the pages say can be typed: every command parses, every example runs, every link leads somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from piledriver.cli.main import parse_command
from piledriver.corpus.pipeline.recipe import load_recipe
from piledriver.corpus.pipeline.stages.filter import licence_allowed
from piledriver.corpus.sources import resolve

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def fenced(page: Path, language: str = "") -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M)
    return [text for kind, text in blocks if kind == language]


def run(page: str, replaced: tuple[str, str] = ("@", "@"), **names: object) -> dict[str, object]:
    """The first example of a page, run as a file of its own would be; the names that it leaves."""
    code = fenced(ROOT / "docs" / page, "python")[0].replace(*replaced)
    held = {"__name__": __name__, **names}
    exec(compile(code, page, "exec", dont_inherit=True), held)
    return held


def commands() -> list[str]:
    """The documented command lines, without what stands beside them: comments, choices, brackets."""
    lines = [line for page in PAGES for block in fenced(page) for line in block.splitlines()]
    shown = [re.split(r"\s{2,}| \| |\s#", line)[0] for line in lines if line.startswith("piledriver ")]
    return sorted({re.sub(r"[][]|\.\.\.", "", line) for line in shown})


@pytest.mark.parametrize("command", commands())
def test_every_documented_command_is_one(command: str) -> None:
    words = [re.sub(r"^N$", "1", word) for word in shlex.split(command)[1:]]
    assert parse_command(words).run_verb


def test_links_lead_to_files() -> None:
    for page in PAGES:
        links = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
        assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_the_first_functional_module_trains() -> None:
    names = run("functional.md", ("@jit", "#"))  # without it, as the page says one may
    assert isinstance(names["loss"], torch.Tensor)
    assert names["state"].step == 1  # type: ignore[attr-defined]


def test_the_recipe_takes_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(fenced(ROOT / "docs" / "corpus.md", "yaml")[0])
    recipe = load_recipe(tmp_path / "recipe.yaml")
    for entry in recipe.sources:
        assert licence_allowed(resolve(entry.source).licence, recipe.licences.allow, recipe.licences.refuse)


def test_the_config_example_is_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("steps: 5\n")
    run("core.md")
    assert capsys.readouterr().out.strip() == "steps: 200"


def test_the_world_example_runs() -> None:
    assert run("runtime.md", loss=torch.tensor(2.0))["total"] == {"loss": torch.tensor(2.0)}
