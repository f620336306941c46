"""What the original used for Pile-CC: warcio, pycld2 on the page, justext with its English stop words."""

from __future__ import annotations

import io

CASES = ["pile-cc/sample-0000.warc.gz"]


def peer(content: bytes) -> str:
    import justext
    import pycld2
    from warcio.archiveiterator import ArchiveIterator

    stop_words = justext.get_stoplist("English")
    pages: list[str] = []
    for record in ArchiveIterator(io.BytesIO(content)):
        if record.rec_type != "response":
            continue
        html = record.content_stream().read().decode("utf-8", "ignore")
        try:
            language = pycld2.detect("".join(character for character in html if character.isprintable()))[2][0][1]
        except pycld2.error:
            continue
        if language == "en":
            paragraphs = justext.justext(html, stop_words)
            pages.append("\n\n".join(paragraph.text for paragraph in paragraphs if not paragraph.is_boilerplate))
    return "\n\n".join(pages)
