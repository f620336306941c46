"""What the original used for OpenSubtitles: BeautifulSoup, sentence by sentence."""


def peer(content: bytes) -> str:
    from bs4 import BeautifulSoup

    sentences = BeautifulSoup(content, "lxml-xml").find_all("s")
    stripped = (s.get_text().replace("\n", "").replace("\t", "").strip().strip("-").strip("/") for s in sentences)
    return " ".join(f'"{sentence}"' for sentence in stripped)


CASES = ["opensubtitles/example.xml"]
