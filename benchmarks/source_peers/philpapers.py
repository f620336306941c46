"""What the original used for PhilPapers' records: BeautifulSoup; for its PDFs see `pdf`."""

from __future__ import annotations

CASES = [
    "philpapers/arxiv_multi_20230125.xml",
    "philpapers/arxiv_0901_2443.xml",
    "philpapers/arxiv_1711_04702.xml",
]


def peer(content: bytes) -> str:
    import warnings

    import bs4

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        soup = bs4.BeautifulSoup(content, "lxml")
    out = []
    for record in soup.find_all("record"):
        parts = [record.find("dc:title"), *record.find_all("dc:description")]
        out.append("\n\n".join(" ".join(part.get_text().split()) for part in parts if part is not None))
    return "\n\n".join(out)
