"""What parsers of the weekly XML files use: BeautifulSoup, then the paragraphs behind the heading."""

from __future__ import annotations

CASES = [
    "uspto-backgrounds/xml2004/US06859910.xml",
    "uspto-backgrounds/xml2006/US07272630B2.xml",
    "uspto-backgrounds/xml2014/US08926509.xml",
    "uspto-backgrounds/xml2014/US08927118.xml",
    "uspto-backgrounds/sgml/US06337117.xml",
]


def peer(content: bytes) -> str:
    import warnings

    import bs4

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        soup = bs4.BeautifulSoup(content, "lxml")
    summary = soup.find("brfsum")
    if summary is not None:
        return "\n".join(" ".join(part.get_text().split()) for part in summary.find_all(["h", "para"]))
    lines: list[str] = []
    inside = False
    for element in soup.find("description").find_all(["heading", "p"]):
        if element.name == "heading":
            if inside:
                break
            inside = "BACKGROUND" in element.get_text()
        elif inside:
            lines.append(" ".join(element.get_text().split()))
    return "\n".join(lines)
