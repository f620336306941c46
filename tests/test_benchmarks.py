"""BENCHMARKS.md is what the results say, and every measurement can be repeated."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.train.corpus import make_tokens

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def report() -> ModuleType:
    return load("report")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_generated(report: ModuleType) -> None:
    assert (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8") == report.page(), "run python benchmarks/report.py"


def test_every_measurement_names_its_command_date_version_and_machine(report: ModuleType) -> None:
    names = {path.stem for path in (ROOT / "benchmarks" / "results").iterdir()}
    assert names <= set(report.load_measures())
    for name in names:
        for record in report.load_results(name):
            assert set(record) == set(report.FIELDS)
            assert all(record[field] for field in ("date", "version", "machine", "measure", "unit"))
            python, script, *_ = record["command"].split()
            assert python == "python"
            assert (ROOT / script).is_file()


def test_every_measure_of_the_table_has_results(report: ModuleType) -> None:
    for name, table in report.load_measures().items():
        known = {record["measure"] for record in report.load_results(name)}
        declared = {measure["measure"] for measure in table["measures"]} - {"{}"}
        assert declared <= known or not known, name


def test_lines_that_benchmarks_print_become_records(report: ModuleType) -> None:
    line = json.loads('{"row": "overhead", "ours": 3.0, "peer": 60.0, "slower_at_20_ms": 0.01}')
    tiny, wide = report.records_of("overhead", line)
    assert (tiny["ours"], tiny["peer"], tiny["theirs"]) == (3.0, "Accelerate", 60.0)
    assert (wide["ours"], wide["peer"]) == (0.01, None)
    about = "What the original used for Books3: html2text."
    line = {"row": "sources", "ours": {"books3": 8.0, "text": None}, "peer": {"books3": 1.0}, "ratio": {"books3": 8.0}}
    (books,) = report.records_of("sources", {**line, "peers": {"books3": about}})
    assert (books["measure"], books["peer"], books["ours"], books["theirs"]) == ("books3", "html2text.", 8.0, 1.0)
    assert list(report.records_of("linear", {"row": "linear: copy", "ours": 4.2})) == []  # not the row of the figures
    line = {"row": "shards", "ours": {"text": 90.0}, "peer": {"polars": 60.0, "datasets": "failed"}, "limit": 100}
    (text,) = report.records_of("shards", line)
    assert (text["ours"], text["peer"], text["theirs"]) == (0.9, "polars", 0.6)


def test_figures_of_the_readme_are_measured(report: ModuleType) -> None:
    records = [record for name in report.load_measures() for record in report.load_results(name)]
    measured = {report.figure(record[key]) for record in records for key in ("ours", "theirs", "ratio")} | {"1", ""}
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Why")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|")[1:] for line in section.splitlines() if line.startswith("| ")][1:]
    assert 0 < len(rows) <= 8
    assert [cell for row in rows for cell in row if cell.strip() not in measured] == []
    numbers = [
        (r["ours"], r["theirs"]) for r in records if not isinstance(r["ours"], list) and r["ours"] and r["theirs"]
    ]
    ratios = {f"{ours / theirs:.2f}" for ours, theirs in numbers} | {report.figure(r["ratio"]) for r in records}
    claims = re.findall(r"[\d.]+(?= times the tokens)|[\d.]+(?= of its memory)|[\d.]+(?= times the documents)", section)
    assert len(claims) == 3
    assert set(claims) <= ratios


def test_a_tiny_form_of_the_large_model_goes_through_gptq(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tokens(tmp_path, documents=60)
    load("compress").gptq_of_some_blocks(2, str(tmp_path / "tokens"), tiny=True)
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (row["blocks_run"], len(row["each_block"])) == (2, 2)
    # Every part that is timed was called by the name under which it is timed. (A tiny part may take 0.00 s.)
    parts = {"open_for_blocks", "save_folder", "statistics", "advance", "add", "gptq", "inverse_factor"}
    assert set(row["where"]) == parts | {"_relative_error"}
