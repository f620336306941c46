"""OpenSubtitles: the XML of OPUS, with sentences as text or as tokens, and srt files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

from piledriver.corpus.document import Document, Refusal
from piledriver.corpus.formats.subtitles.formats import read_captions
from piledriver.corpus.formats.subtitles.sentences import joined_cues, joined_words, undecorated
from piledriver.corpus.formats.xml import parse as xml
from piledriver.corpus.sources.base import Found, Piece, Source, ends_with, one_piece, per_file

# OpenSubtitles/raw/en/1933/24240/3991985.xml: language, year, number of the film in IMDb, number of the subtitles.
_PLACE = re.compile(r"(?:^|[/!])([a-z]{2,3}(?:_[a-zA-Z]{2,4})?)/(\d{1,4})/(\d+)/[^/!]+$")
_META = {
    "language": "language",
    "genre": "genre",
    "year": "year",
    "original": "original_language",
    "country": "country",
}


def _documents(piece: Piece, *, form: Literal["quoted", "lines"] = "quoted") -> Iterator[Found]:
    """Yield the sentences of one file as one document: quoted on one line, as in The Pile, or one sentence a line."""
    content = piece.read(1 << 26)
    meta: dict[str, Any] = {"origin": piece.origin, **_from_place(piece.origin)}
    if content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        try:
            root = xml.parse_xml(content.lstrip())
        except xml.XmlError as error:
            yield Refusal("invalid xml", piece.origin, str(error))
            return
        lines = [_sentence(element) for element in root.iter("s")]
        if not lines:
            yield Refusal("no sentences", piece.origin)
            return
        described = {key: (root.findtext(f".//meta//{tag}") or "").strip() for tag, key in _META.items()}
        meta = {**{key: value for key, value in described.items() if value}, **meta}
        if root.get("id"):
            meta["subtitle_id"] = root.get("id")
    else:
        try:
            lines = joined_cues(read_captions(content).cues)
        except ValueError as error:
            yield Refusal("no timed text", piece.origin, str(error))
            return
    sentences = [sentence for raw in lines if (sentence := undecorated(raw))]
    text = " ".join(f'"{sentence}"' for sentence in sentences) if form == "quoted" else "\n".join(sentences)
    yield Document(text, meta=meta)


def _sentence(element: Any) -> str:
    words = [(word.text or "").strip() for word in element.iter("w")]
    if words:
        return joined_words([word for word in words if word])
    return " ".join("".join(element.itertext()).split())


def _from_place(origin: str) -> dict[str, Any]:
    place = _PLACE.search(origin)
    if place is None:
        return {}
    return {"language": place.group(1), "year": place.group(2), "imdb_id": f"tt{int(place.group(3)):07d}"}


SOURCE = Source(
    slug="opensubtitles",
    name="OpenSubtitles",
    title="subtitles of films and series",
    raw_format="OPUS XML (raw or tokenised), alone, gzipped or in the zip of a language; srt files",
    licence="none: the subtitles belong to their authors and the films' owners",
    consent="none",
    treatment=(
        "One file is one document: each sentence in double quotes, without the dashes and slashes that mark speakers, "
        "joined by spaces to one line, as in the original; from Python, form='lines' of with_settings gives one "
        "sentence a line without quotes. Tokens are put together again (do n't, he said .). The original removed line "
        "breaks inside a sentence, which glued words or left runs of spaces, and kept empty sentences; here a run of "
        "white space is one space, and empty sentences are left out. In srt files, formatting is removed and sentences "
        "that run over several cues are joined. Language, year, genre and the film's number go to the meta where the "
        "file or its place says them."
    ),
    citation="Lison and Tiedemann, OpenSubtitles2016, LREC 2016; https://opus.nlpl.eu/OpenSubtitles",
    wants=ends_with(".xml", ".srt"),
    pieces=per_file(one_piece),
    documents=_documents,
)
