"""What the original used for OpenSubtitles: BeautifulSoup, sentence by sentence."""


def peer(content: bytes) -> str:
    from bs4 import BeautifulSoup

    sentences = BeautifulSoup(content, "lxml-xml").find_all("s")
    return "\n".join(s.get_text().replace("\n", "").replace("\t", "").strip().strip("-").strip("/") for s in sentences)


CASES = ["opensubtitles/example.xml"]
