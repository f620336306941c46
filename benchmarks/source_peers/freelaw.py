"""What the original used for FreeLaw: BeautifulSoup's text of the last form that is not empty."""

from __future__ import annotations

import json

CASES = [
    *("freelaw/1800s_1830_85689.json", "freelaw/1900s_1999_118276.json", "freelaw/1900s_1938_103054.json"),
    *("freelaw/2000s_2008_145928.json", "freelaw/1900s_1961_106178.json", "freelaw/1800s_1882_90557.json"),
]
FIELDS = ("plain_text", "html", "html_lawbox", "html_columbia", "html_anon_2020", "html_with_citations", "xml_harvard")


def peer(content: bytes) -> str:
    from bs4 import BeautifulSoup

    opinion = json.loads(content)
    text = ""
    for field in FIELDS:
        if opinion.get(field):
            text = opinion[field] if field == "plain_text" else BeautifulSoup(opinion[field], "lxml").get_text()
    return text
