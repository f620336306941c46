"""Parse the formats of timed text: srt, WebVTT, sbv, YouTube's XML and JSON, TTML."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from piledriver.corpus.formats.subtitles.cues import Cue, cleaned, lines_of, looks_rolling, seconds, without_rolling
from piledriver.corpus.formats.subtitles.transcript import plain_transcript
from piledriver.corpus.formats.xml import parse as xml
from piledriver.corpus.text.normalise import decode_text

_TIMING = re.compile(r"\s*(\d{1,4}(?::\d{1,2}){1,2}[.,]\d{1,3})\s*-+>\s*(\d{1,4}(?::\d{1,2}){1,2}[.,]\d{1,3})")
_SBV = re.compile(r"(\d+:\d\d:\d\d\.\d{1,3}),(\d+:\d\d:\d\d\.\d{1,3})\s*")
_BROKEN_TIMING = re.compile(r"\d{1,3}:\d\d:\S{0,8},\d{1,3}:\d\d:")
_WORD_TIMING = re.compile(r"<\d\d:\d\d[\d:.]{0,8}>")
_LANGUAGE = re.compile(r"(?m)^Language:\s*([\w-]+)")


class Captions(msgspec.Struct, frozen=True):
    """The cues of one file, its language, and whether speech recognition generated them."""

    cues: list[Cue]
    language: str = ""
    generated: bool = False


def read_captions(content: bytes) -> Captions:
    """Parse a file in any of the formats, detected by its beginning; raise `ValueError` for other files."""
    if (cues := plain_transcript(content)) is not None:
        return Captions(cues)
    text = decode_text(content).lstrip("\ufeff \t\r\n")
    if text.startswith("WEBVTT"):
        return _web_vtt(text)
    if text[:1] in "{[" and text:
        try:
            return _json(msgspec.json.decode(text))
        except msgspec.DecodeError as error:
            raise ValueError(f"invalid json: {error}") from None
    if text.startswith("<"):
        try:
            return _xml(xml.parse_xml(content.lstrip()))
        except xml.XmlError as error:
            raise ValueError(f"invalid xml: {error}") from None
    cues = timed_lines(text)
    if not cues:
        raise ValueError("no timed text")
    return Captions(without_rolling(cues) if looks_rolling(cues) else cues)


def timed_lines(text: str) -> list[Cue]:
    """Parse srt and similar formats: a line with two times, then the text until the next one."""
    cues: list[Cue] = []
    lines: list[str] = []
    start = end = 0.0
    open_cue = False

    number = 0
    blank = blank_before_last = False

    def close() -> None:
        if open_cue and (shown := [line for raw in lines if (line := cleaned(raw))]):
            cues.append(Cue(start, end, shown))

    for raw in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        line = raw.strip()
        timing = None
        # Times start with a digit; most lines do not, and need no pattern.
        if line[:1].isdigit() and ":" in line:
            timing = _TIMING.match(line) or _SBV.fullmatch(line)
        if timing is not None:
            # The line right before the times is the number or the name of this cue, not text of the last one.
            if lines and not blank:
                counts_on = lines[-1].isdigit() and (blank_before_last or lines[-1] == str(number + 1))
                if counts_on or (blank_before_last and len(lines) > 1):
                    name = lines.pop()
                    number = int(name) if name.isascii() and name.isdigit() and len(name) < 9 else number
            close()
            lines = []
            start, end = seconds(timing.group(1)), seconds(timing.group(2))
            open_cue, blank, blank_before_last = True, False, False
        elif not line or "-->" in line or (line[0].isdigit() and _BROKEN_TIMING.match(line)):
            # Times that cannot be read are not text either.
            blank = True
        elif blank and number and line == str(number + 1):
            # The number of a cue whose times are missing.
            number += 1
        else:
            blank_before_last, blank = blank, False
            lines.append(line)
    close()
    return cues


def _web_vtt(text: str) -> Captions:
    head, _, _ = text.partition("\n\n")
    language = _LANGUAGE.search(head[:2000])
    body = re.sub(r"(?m)^(?:NOTE|STYLE|REGION)\b(?:[^\n]*\n)(?:[^\n]+\n)*", "\n", text)
    generated = len(_WORD_TIMING.findall(text[:200_000])) > 2
    cues = timed_lines(body)
    if generated or looks_rolling(cues):
        cues = without_rolling(cues)
    return Captions(cues, language.group(1) if language else "", generated)


def _json(value: Any) -> Captions:
    cues: list[Cue] = []
    generated, language = False, ""
    if isinstance(value, dict) and not isinstance(value.get("events"), list):
        # An object of the transcript package, or its response for several videos, with one video.
        lists = [inner for name, inner in value.items() if isinstance(inner, list) and name != "translation_languages"]
        if len(lists) != 1:
            raise ValueError("no events")
        generated = value.get("is_generated") is True
        language = value["language_code"] if isinstance(value.get("language_code"), str) else ""
        value = lists[0]
    if isinstance(value, dict):
        for event in value["events"]:
            # An event that appends only rolls the window: its text is the line break.
            segments = event.get("segs") if isinstance(event, dict) and not event.get("aAppend") else None
            if not isinstance(segments, list):
                continue
            generated = generated or any(isinstance(s, dict) and "acAsrConf" in s for s in segments)
            said = "".join(str(s.get("utf8", "")) for s in segments if isinstance(s, dict))
            start = _number(event.get("tStartMs")) / 1000
            cues.append(Cue(start, start + _number(event.get("dDurationMs")) / 1000, lines_of(said)))
    else:
        for item in value:
            if isinstance(item, dict) and isinstance(item.get("text"), str):
                start = _number(item.get("start"))
                end = _number(item.get("end")) or start + _number(item.get("duration"))
                cues.append(Cue(start, end, lines_of(item["text"])))
    return Captions([cue for cue in cues if cue.lines], language, generated)


def _xml(root: Any) -> Captions:
    cues: list[Cue] = []
    name = _name(root)
    generated = False
    if name == "transcript":
        for element in root.iter("text"):
            start = seconds(element.get("start") or "0")
            cues.append(Cue(start, start + seconds(element.get("dur") or "0"), lines_of(_said(element))))
    elif name == "timedtext":
        for element in root.iter("p", "text"):
            if element.get("a") == "1":
                continue
            generated = generated or any(child.get("ac") for child in element)
            start = _number(element.get("t")) / 1000
            cues.append(Cue(start, start + _number(element.get("d")) / 1000, lines_of(_said(element))))
    elif name == "tt":
        for element in root.iter("{*}p"):
            start = seconds(element.get("begin") or "0")
            end = seconds(element.get("end") or "0") or start + seconds(element.get("dur") or "0")
            cues.append(Cue(start, end, lines_of(_said(element))))
    else:
        raise ValueError(f"no timed text in <{name}>")
    language = root.get("{http://www.w3.org/XML/1998/namespace}lang") or ""
    return Captions([cue for cue in cues if cue.lines], language, generated)


def _said(element: Any) -> str:
    if not len(element):
        return element.text or ""
    parts = [element.text or ""]
    for child in element.iter():
        if child is element:
            continue
        if _name(child) == "br":
            parts.append("\n")
        parts.append(child.text or "" if isinstance(child.tag, str) else "")
        parts.append(child.tail or "")
    return "".join(parts)


def _name(element: Any) -> str:
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def _number(value: Any) -> float:
    try:
        number = float(value or 0)
    except (TypeError, ValueError):
        return 0.0
    return number if 0 <= number < 1e12 else 0.0
