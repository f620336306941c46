"""The demo, small: everything that it shows is what the verbs would show, and every number is explained."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from piledriver.core.errors import UsageError
from piledriver.demo import run_demo
from piledriver.demo.domains import find_domains
from piledriver.demo.page import columns

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
    assert not re.search(r"(src|href)='?http", page), "nothing is loaded from anywhere"
    again = find_domains(Path(out) / "raw", 40_000, seed=0)
    assert again == result.domains, "the same texts, whatever was imported since"


def test_what_cannot_be_is_said_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file"):
        run_demo(str(tmp_path / "file"))
    with pytest.raises(UsageError, match="-1 minutes"):
        run_demo(str(tmp_path / "new"), minutes=-1)
    assert not (tmp_path / "new").exists()
