"""What the original used for Books3: html2text without wrapping over the spine."""

from __future__ import annotations

import io
import posixpath
import xml.etree.ElementTree as ElementTree
import zipfile

CASES = ["books3/alice.epub"]


def peer(content: bytes) -> str:
    import html2text

    converter = html2text.HTML2Text()
    converter.body_width = 0
    converter.ignore_links = converter.ignore_images = True
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        path = next(name for name in archive.namelist() if name.endswith(".opf"))
        package = ElementTree.fromstring(archive.read(path))
        items = {item.get("id"): item.get("href") for item in package.iter() if item.tag.endswith("}item")}
        texts: list[str] = []
        for reference in package.iter():
            if reference.tag.endswith("}itemref"):
                chapter = posixpath.join(posixpath.dirname(path), items[reference.get("idref")] or "")
                texts.append(converter.handle(archive.read(chapter).decode("utf-8")))
    return "\n\n".join(texts)
