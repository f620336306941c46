"""The demo, small: everything that it shows is what the verbs would show, and every number is explained."""

from __future__ import annotations

import html
import math
import re
from pathlib import Path

import pytest

from piledriver.core.errors import UsageError
from piledriver.corpus import read_shards
from piledriver.data.tokenizer.open import open_tokenizer
from piledriver.demo import run_demo
from piledriver.demo.domains import find_domains
from piledriver.demo.page import columns
from piledriver.demo.samples import first_words, make_samples
from piledriver.models.interchange import load_folder

pytest.importorskip("matplotlib")


@pytest.mark.slow
@pytest.mark.timeout(900)
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
