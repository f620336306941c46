"""Names of languages, and the video and language of a caption file by its path."""

from __future__ import annotations

import os
import re

import msgspec

from piledriver.corpus.text.data_table import data_table

LANGUAGES: dict[str, str] = data_table(__package__, "languages.yaml")["languages"]
_BY_NAME = {name.lower(): code for code, name in LANGUAGES.items()}
_BY_NAME |= {"bengali": "bn", "norwegian": "no", "hebrew": "he"}

_SUFFIX = re.compile(r"\.(?:vtt|srt|sbv|ttml|xml|srv[123]|json3?|json)(?:\.gz)?$", re.IGNORECASE)
_CODE_AT_END = re.compile(r"^(.+?)[._-]([a-z]{2,3}(?:-[A-Za-z0-9]{2,8}){0,2})$")
# YouTube's ids are 64 bits in base64: eleven characters, of which the last has sixteen values. yt-dlp writes them in
# brackets, youtube-dl after a hyphen at the end of a file's name.
_ID = r"[A-Za-z0-9_-]{10}[AEIMQUYcgkosw048]"
_VIDEO = re.compile(rf"\[({_ID})\]")
_VIDEO_AT_END = re.compile(rf"(?:^|-)({_ID})$")


class CaptionFile(msgspec.Struct, frozen=True):
    """The video and the language of a caption file, empty where its path does not tell."""

    video: str
    language: str
    label: str


def describe(origin: str) -> CaptionFile:
    """Describe a path such as `Title [id].en.vtt`, `video/english.srt` or `video/english/captions.srt`.

    >>> describe("talks/moser/english.srt")
    CaptionFile(video='talks/moser', language='en', label='English')
    >>> describe("Moser [YtkIWDE36qU].pt-BR.vtt")
    CaptionFile(video='Moser [YtkIWDE36qU]', language='pt-BR', label='Portuguese')
    """
    folder, _, name = origin.replace("!", "/").rpartition("/")
    stem = _SUFFIX.sub("", name)
    ending = _CODE_AT_END.match(stem)
    if ending is not None and ending.group(2).split("-")[0].lower() in LANGUAGES:
        code = ending.group(2)
        return CaptionFile(os.path.join(folder, ending.group(1)), code, LANGUAGES[code.split("-")[0].lower()])
    first, _, rest = stem.partition("_")
    if (code := _code_of(first)) is not None:
        label = LANGUAGES[code]
        return CaptionFile(
            folder, code, f"{label} ({rest.replace('_', ' ')})" if rest and rest != "community" else label
        )
    parent = os.path.basename(folder)
    if (code := _code_of(parent)) is not None:
        return CaptionFile(os.path.dirname(folder), code, LANGUAGES[code])
    return CaptionFile(os.path.join(folder, stem), "", "")


def video_id(video: str, *, of_file: bool) -> str | None:
    """Return YouTube's id of a video where its name has one: in brackets, or at the end of the name of a file.

    >>> video_id("Moser [YtkIWDE36qU]", of_file=False), video_id("Moser-YtkIWDE36qU", of_file=True)
    ('YtkIWDE36qU', 'YtkIWDE36qU')
    >>> video_id("talks/mathematics", of_file=True), video_id("talks/my-YtkIWDE36qU", of_file=False)
    (None, None)
    """
    name = os.path.basename(video)
    if found := _VIDEO.search(name):
        return found[1]
    found = _VIDEO_AT_END.search(name) if of_file else None
    letters = found[1].replace("-", "") if found else ""
    # A word is no id.
    is_word = letters.isalpha() and (letters.islower() or letters.istitle() or letters.isupper())
    return found[1] if found and not is_word else None


def _code_of(name: str) -> str | None:
    lowered = name.lower()
    return _BY_NAME.get(lowered) or (lowered if lowered in LANGUAGES else None)
