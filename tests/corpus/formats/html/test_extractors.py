from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from piledriver.core.errors import UnknownNameError
from piledriver.corpus.extraction import extract_files
from piledriver.corpus.formats.html.extractors import extract_page
from piledriver.corpus.sources import SOURCES

PAGE = (
    "<html><body><nav><a href=a>Home</a></nav><article><h1>Tides</h1>"
    + 9 * ("<p>The tide comes twice a day, and twice a day it goes, as long as the moon stays where it is.</p>")
    + "</article></body></html>"
)


@pytest.mark.parametrize("extractor", ["piledriver", "trafilatura", "resiliparse"])
def test_each_extractor_finds_the_prose(extractor: Any) -> None:
    if extractor == "trafilatura":
        pytest.importorskip("trafilatura")
    text = extract_page(PAGE, extractor)
    assert text.count("The tide comes twice a day") == 9
    assert "Home" not in text


def test_the_extractor_is_a_setting_of_the_sources_of_pages(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(PAGE)
    for slug in ("html", "pile-cc", "openwebtext2"):
        source = SOURCES[slug].with_settings(extractor="resiliparse")
        assert [item.text for item in extract_files(source, [str(tmp_path)])]  # type: ignore[union-attr]
    with pytest.raises(UnknownNameError, match="extracter"):
        SOURCES["html"].with_settings(extracter="resiliparse")
    with pytest.raises(UnknownNameError, match="justext"):
        extract_page(PAGE, "justext")  # type: ignore[arg-type]
