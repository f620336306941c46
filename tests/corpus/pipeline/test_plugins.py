"""A filter and a stage of another package, through entry points: the examples of CONTRIBUTING.md, in a build."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from piledriver.corpus.pipeline.ledger import read_ledger
from piledriver.corpus.pipeline.manifest import load_manifest, verify_corpus

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
RECIPE = """
splits: {validation: 0, test: 0}
sources: [{source: text, name: Notes, paths: [raw]}]
stages:
  - {use: shouting, settings: {max_capitals: 0.3}}
  - {use: first-documents, settings: {documents: 5}}
  - {use: exact}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installed package with the code of the worked examples."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "my_package").mkdir()
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for path, code in re.findall(r"```python\n# (src/piledriver/corpus/\S+)\n(.*?)```", text, re.DOTALL):
        (folder / "my_package" / Path(path).name).write_text(code)
    entry_points = re.compile(
        r'```toml\n\[project\.entry-points\."(piledriver\.(?:filter|stage))"\]\n(.*?)```', re.DOTALL
    )
    points = entry_points.findall(text)
    info = folder / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("".join(f"[{group}]\n{lines}" for group, lines in points).replace('"', ""))
    return folder


def piledriver(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(ROOT / "src")])
    command = [sys.executable, "-m", "piledriver.cli.main", "corpus", *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


def test_a_build_with_a_filter_and_a_stage_of_another_package(site: Path, tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    for number in range(9):
        (tmp_path / "raw" / f"{number}.txt").write_text(f"quiet words of document {number}")
    (tmp_path / "raw" / "3.txt").write_text("LOUD WORDS")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    built = piledriver(site, "build", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "out"), "--workers", "2")
    assert built.returncode == 0, built.stderr
    assert verify_corpus(tmp_path / "out") == []
    manifest = load_manifest(tmp_path / "out")
    assert [stage["stage"] for stage in manifest.stages] == ["extract", "filter", "first-documents", "exact"]
    assert manifest.stages[-1]["sources"]["Notes"]["documents"] == 5
    dropped = [(row["stage"], row["reason"]) for row in read_ledger(tmp_path / "out")]
    assert dropped == [("shouting", "too many capitals")] + [("first-documents", "enough documents of its source")] * 3
    wrong = piledriver(site, "build", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "o"), "stages.1.settings.x=1")
    assert wrong.returncode != 0
    assert "unknown key" in wrong.stderr


def test_the_plugins_are_listed_with_their_settings(site: Path) -> None:
    listed = json.loads(piledriver(site, "filters", "--json").stdout)
    found = {entry["name"]: entry for entry in listed}
    assert found["shouting"]["settings"][0]["help"] == "Share of capitals among all letters."
    assert found["first-documents"]["settings"][0]["name"] == "documents"


def test_a_stage_cannot_take_the_name_of_a_filter(site: Path, tmp_path: Path) -> None:
    other = tmp_path / "other-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[piledriver.stage]\nlength = my_package.first_documents:FirstDocuments\n")
    (tmp_path / "recipe.yaml").write_text("sources: [{source: text, paths: [raw]}]\nstages: [{use: length}]\n")
    path = Path(f"{tmp_path}{os.pathsep}{site}")
    built = piledriver(path, "build", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "out"))
    assert "'length' names a filter and a stage" in built.stderr
