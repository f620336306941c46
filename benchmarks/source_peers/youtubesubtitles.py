"""What the original used for YoutubeSubtitles: youtube-transcript-api's parser (ElementTree, in C), then minutes.

The library downloads and parses in one; this is what its parser does with the answer: ElementTree (in C), entities and
tags taken out of each line by `html.unescape` and a pattern. `made` writes real captions as that XML.
"""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

CASES: list[str] = []
_TIME = r"(\d\d):(\d\d):(\d\d)[,.](\d{3})"
_CUE = re.compile(rf"\d+\n{_TIME} --> {_TIME}\n(.*?)(?:\n\n|\Z)", re.DOTALL)
_TAG = re.compile(r"<[^>]*>")


def made() -> dict[str, bytes]:
    """The captions of the samples as YouTube's XML."""
    folder = Path(__file__).resolve().parents[3] / "shared" / "raw-samples" / "youtubesubtitles"
    files: dict[str, bytes] = {}
    for path in (folder / "moser" / "english.srt", folder / "binary-counting" / "tamil_community.srt"):
        if path.exists():
            lines = []
            text = path.read_text(encoding="utf-8-sig").replace("\r\n", "\n")
            for a, b, c, d, e, f, g, h, said in _CUE.findall(text):
                start = 3600 * int(a) + 60 * int(b) + int(c) + int(d) / 1000
                end = 3600 * int(e) + 60 * int(f) + int(g) + int(h) / 1000
                # Escaped twice, as the server does.
                escaped = html.escape(html.escape(said, quote=True), quote=False)
                lines.append(f'<text start="{start:.3f}" dur="{end - start:.3f}">{escaped}</text>')
            files[f"{path.parent.name}.{path.stem}.xml"] = (
                '<?xml version="1.0" encoding="utf-8" ?><transcript>' + "".join(lines) + "</transcript>"
            ).encode()
    return files


def peer(content: bytes) -> str:
    cues = [
        {
            "text": _TAG.sub("", html.unescape(element.text)),
            "start": float(element.attrib["start"]),
            "duration": float(element.attrib.get("dur", "0.0")),
        }
        for element in ElementTree.fromstring(content.decode("utf-8"))
        if element.text is not None
    ]
    minutes: dict[int, list[str]] = {}
    for cue in cues:
        minutes.setdefault(int((cue["start"] + cue["duration"]) // 60), []).append(cue["text"])
    return "\n".join("\n".join(lines) for _, lines in sorted(minutes.items()))
