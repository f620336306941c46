"""The demo, small: everything that it shows is what the verbs would show, and every number is explained."""

from __future__ import annotations

import html
import math
import re
from pathlib import Path

import pytest

from piledriver.core.errors import UsageError
from piledriver.corpus import Document, read_shards
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.demo import run_demo
from piledriver.demo.compression import run_compression_demo
from piledriver.demo.domains import find_domains
from piledriver.demo.page import columns
from piledriver.demo.run import _few, _reserve
from piledriver.demo.samples import first_words, make_samples
from piledriver.models.interchange import load_folder
from piledriver.train.reporting.metrics import read_metrics
from piledriver.train.reporting.plots import validation_plot

pytest.importorskip("matplotlib")


@pytest.mark.slow
def test_the_whole_way(tmp_path: Path) -> None:
    out, said = str(tmp_path / "demo"), list[str]()
    result = run_demo(out, minutes=0.02, bytes_each=40_000, say=said.append)
    assert len(result.domains) >= 2
    assert said[0].startswith(f"found {len(result.domains)} domains")
    shown = columns(result)
    assert all(math.isfinite(value) for column in shown.values() for value in column.values())
    assert {tuple(column) for column in shown.values()} == {tuple(result.after)}, "every column has every row"
    page = Path(out, "report.html").read_text()
    for name, column in shown.items():
        assert f"<dt>{name}</dt>" in page, "each column is explained"
        assert all(f">{value:.3f}</td>" in page for value in column.values())
    assert page.count("data:image/png;base64,") == 3
    rows = read_metrics(Path(out, "run"))
    measured = {name for row in rows for name in row if name.startswith("validation/")}
    assert measured >= {f"validation/{name}" for name in result.after}, "every domain of the table"
    lines = validation_plot(rows).axes[0].get_legend().get_texts()
    assert {text.get_text().split("  ")[0] for text in lines} == {name.partition("/")[2] for name in measured}
    assert not re.search(r"(src|href)='?http", page), "nothing is loaded from anywhere"
    test = list(read_shards(Path(out, "corpus", "test")))
    assert {sample.domain for sample in result.samples} == {d.source for d in test if len(d.text) > 240}
    for sample in result.samples:
        whole = sample.prompt + sample.in_document
        assert any(d.source == sample.domain and d.text.startswith(whole) for d in test), "its own first words"
        assert f"<b>{html.escape(sample.prompt)}</b>{html.escape(sample.written)}</pre>" in page
    model, tokenizer = load_folder(Path(out, "run", "model")), open_tokenizer(Path(out, "tokenizer.json"))
    assert make_samples(model, tokenizer, test) == result.samples, "the same model and texts, the same samples"
    again = find_domains(Path(out) / "raw", 40_000, seed=0)
    assert again == result.domains, "the same texts, whatever was imported since"
    report = run_compression_demo(out, minutes=0.02, samples=4, documents=3, new_tokens=2, say=said.append)
    sizes = {row["name"]: row["bytes"] for row in report["models"]}
    assert list(sizes) == ["dense", "pruned", "recovered", "quantised"]
    assert sizes["quantised"] < sizes["pruned"] == sizes["recovered"] < sizes["dense"]
    acts = [record["act"] for record in report["models"][-1]["records"]]
    assert acts == ["prune", "reconstruct", "distil", "quantise"]
    assert Path(out, "compressed", "report.html").exists()


def test_validation_gets_a_document_of_each_domain_from_the_test_split() -> None:
    """A small split may have none of a domain; where the other has several, it gives its last, else it shares."""
    test = [Document(text, source=source) for text, source in [("1", "a"), ("2", "b"), ("3", "a"), ("4", "c")]]
    validation = [Document("x" * 9, source="b")] * 3
    kept, reserved = _reserve(test, validation)
    assert [document.text for document in kept] == ["1", "2", "4"], "a test of every domain stays"
    assert [document.text for document in reserved] == ["3", "4"]
    held_out = _few([*validation, *reserved], each=2, characters=5)
    assert [document.text for document in held_out] == ["3", "xxxxx", "xxxxx", "4"], "a, b, b, c"


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        ("  #!/bin/sh\nset -e\n", "  #!/bin/sh\nset -e"),
        (" ".join(f"word{i}" for i in range(99)), " ".join(f"word{i}" for i in range(16))),
        ("a " + "b" * 500, "a"),
        ("b" * 500, "b" * 120),
        (" " * 500, " " * 120),
    ],
)
def test_first_words_are_whole_and_not_too_many(text: str, prompt: str) -> None:
    assert first_words(text) == prompt


def test_what_cannot_be_is_said_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        run_demo(str(tmp_path / "file"))
    with pytest.raises(UsageError, match="-1 minutes"):
        run_demo(str(tmp_path / "new"), minutes=-1)
    assert not (tmp_path / "new").exists()
