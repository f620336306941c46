"""What the original used for PubMed Abstracts: BeautifulSoup on each record."""

from __future__ import annotations

import re

CASES = [
    "pubmed-abstracts/Entrez_pubmed1.xml",
    "pubmed-abstracts/Entrez_pubmed2.xml",
    "pubmed-abstracts/pubmed-29768149.xml",
]


def peer(content: bytes) -> str:
    import bs4

    out = []
    for record in re.findall(r"<PubmedArticle>.*?</PubmedArticle>", content.decode("utf-8"), re.DOTALL):
        soup = bs4.BeautifulSoup(record, "lxml")
        abstract, title = soup.find("abstract"), soup.find("articletitle")
        if abstract is None or title is None or soup.find("articleid", idtype="pmc") is not None:
            continue
        notice = abstract.find("copyrightinformation")
        if notice is not None:
            notice.decompose()
        out.append("\n".join(" ".join(part.get_text().split()) for part in (title, abstract)))
    return "\n\n".join(out)
