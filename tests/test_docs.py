"""What the pages say can be typed: every command parses, every example runs, every link leads somewhere."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
from _pytest.mark.structures import ParameterSet

from piledriver.cli.main import VERBS, parse_command
from piledriver.corpus.pipeline.recipe import load_recipe
from piledriver.corpus.pipeline.stages.filter import licence_allowed
from piledriver.corpus.sources import resolve

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The lab notebook tells what was, with the names of its day.
CURRENT = [page for page in PAGES if page.name != "LOG.md"]
# Named in pages, and no module: the groups that other packages register under.
GROUPS = ("source", "filter", "stage", "optimizer", "model_family", "model_preset", "tracker", "planner", "KIND")


def fenced(page: Path, language: str = "") -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M)
    return [text for kind, text in blocks if kind == language]


def run(page: str, replaced: tuple[str, str] = ("@", "@"), **names: object) -> dict[str, object]:
    """The first example of a page, run as a file of its own would be; the names that it leaves."""
    code = fenced(ROOT / "docs" / page, "python")[0].replace(*replaced)
    held = {"__name__": __name__, **names}
    exec(compile(code, page, "exec", dont_inherit=True), held)
    return held


def numbered_blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """First line, language and content of each fenced block."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M):
        yield text.count("\n", 0, found.start()) + 2, found[1], found[2]


def commands() -> list[ParameterSet]:
    """The documented command lines, without what stands beside them: comments, choices, brackets."""
    found = []
    for page in PAGES:
        for first, language, block in numbered_blocks(page):
            for number, line in enumerate(block.splitlines(), first):
                if language in ("", "bash", "sh", "console") and line.startswith("piledriver "):
                    command = re.sub(r"[][]|\.\.\.", "", re.split(r"\s{2,}| \| |\s#", line)[0])
                    found.append(pytest.param(command, id=f"{page.relative_to(ROOT)}:{number}"))
    return found


def mentioned_commands() -> Iterator[tuple[str, str]]:
    """Place and text of `piledriver VERB ...` in running text."""
    for page in CURRENT:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            for command in re.findall(r"`piledriver ([a-z][^`]*)`", line):
                yield f"{page.relative_to(ROOT)}:{number}", command


def shown_names() -> Iterator[tuple[str, str, str]]:
    """Place, module and name of what pages import in examples, or name with its full path in running text."""
    for page in CURRENT:
        where = page.relative_to(ROOT)
        for first, language, block in numbered_blocks(page):
            if language not in ("python", "py"):
                continue
            for found in re.finditer(r"^\s*from (piledriver[\w.]*) import (\([^)]*\)|[^(\n]*)", block, re.M):
                number = first + block.count("\n", 0, found.start())
                listed = re.sub(r"#[^\n]*", "", found[2])
                for name in re.findall(r"\w+", re.sub(r"\bas \w+", "", listed)):
                    yield f"{where}:{number}", found[1], name
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            for path in re.findall(r"`(piledriver(?:\.\w+)+)(?:\([^`]*\))?`", line):
                if path.split(".")[1] not in GROUPS and not path.endswith("_kernel"):
                    yield f"{where}:{number}", path.rpartition(".")[0], path.rpartition(".")[2]


def exists(module: str, name: str) -> bool:
    """Whether a name can be imported from a module, or is an attribute of a class in it."""
    for split in range(module.count(".") + 1):
        parts = module.rsplit(".", split)
        try:
            found: object = importlib.import_module(parts[0])
        except ModuleNotFoundError:
            continue
        for part in (*parts[1:], name):
            if hasattr(found, part):
                found = getattr(found, part)
            elif isinstance(found, ModuleType) and hasattr(found, "__path__"):
                if importlib.util.find_spec(f"{found.__name__}.{part}") is None:
                    return False
                found = importlib.import_module(f"{found.__name__}.{part}")
            else:
                return False
        return True
    return False


@pytest.mark.parametrize("command", commands())
def test_every_documented_command_is_one(command: str) -> None:
    words = [re.sub(r"^N$", "1", word) for word in shlex.split(command)[1:]]
    assert parse_command(words).run_verb


def test_every_verb_in_running_text_is_one() -> None:
    unknown = []
    for place, command in mentioned_commands():
        group: Mapping[str, tuple[str, str]] | None = VERBS
        for word in command.split():
            if group is None or not re.fullmatch(r"[a-z-]+", word) or word.startswith("-"):
                break
            if word not in group:
                unknown.append(f"{place}: piledriver {command}")
                break
            group = getattr(importlib.import_module(group[word][0]), "VERBS", None)
    assert unknown == []


def test_every_name_that_a_page_shows_can_be_imported() -> None:
    missing = [f"{place}: {module}.{name}" for place, module, name in shown_names() if not exists(module, name)]
    assert missing == []


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


@pytest.mark.parametrize("page", ["checkpoint.md", "observe.md"])
def test_the_examples_of_a_page_run_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    held: dict[str, object] = {"__name__": __name__}
    for code in fenced(ROOT / "docs" / page, "python"):
        exec(compile(code, page, "exec", dont_inherit=True), held)


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = re.findall(r"`((?:src|tests|benchmarks|examples|docs)/[\w/.-]+)`", page.read_text(encoding="utf-8"))
    # `x.py` stands for a file that the reader adds.
    assert not [name for name in named if not (ROOT / name).exists() and not name.endswith("/x.py")]
